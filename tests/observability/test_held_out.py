"""Answers to held-out problems: written with the row of their step, cut at a resume, read as the file grows."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge.envs.group import SingleTurnEnv
from forge.observability import Run
from forge.observability.metrics import Snapshot
from forge.observability.rollouts import HELD_OUT
from forge.rewards.reward import Score
from forge.types import Completion, Prompt, Sample
from forge_inspect.watch.views import Answers

SAMPLES = [Sample(Prompt(f"{number} + 1 =", (number, 7), number), str(number + 1)) for number in range(6)]


class Says:
    """A policy that answers each prompt with a text, and a reward that knows what is right."""

    def __init__(self, texts: list[str], scores: list[tuple[float | None, bool | None]]) -> None:
        async def generate(prompt: Prompt, n: int, seed: int, **_: Any) -> list[Completion]:
            ids = [1] * (1 + len(texts[seed]))
            done = Completion(text=texts[seed], token_ids=ids, logprobs=[0.0] * len(ids), prompt_ids=[1], finish="stop")
            return [done]

        async def score(
            prompt: Prompt, responses: list[str], target: str, evaluation: bool, completions: object = None
        ) -> list[Score]:
            return [Score(*scores[prompt.index])]

        self.generate = SimpleNamespace(route=generate)
        self.score = SimpleNamespace(route=score)


def evaluated(
    record: Run, step: int, texts: list[str], scores: list[tuple[float | None, bool | None]]
) -> dict[str, float]:
    says = Says(texts, scores)
    found = asyncio.run(SingleTurnEnv(says).evaluate(says, SAMPLES, record.keep_evaluation))
    return record.log(step, Snapshot(), **found)


TEXTS = ["1", "two", "", "4", "five", "6"]
FIRST: list[tuple[float | None, bool | None]] = [
    (0.5, False),
    (0.25, False),
    (0.0, False),
    (1.0, True),
    (None, None),
    (0.75, None),
]
SECOND: list[tuple[float | None, bool | None]] = [
    (1.0, True),
    (0.25, False),
    (0.0, False),
    (1.0, True),
    (1.0, True),
    (1.0, True),
]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    record = Run("one", {}, steps=4, root=str(tmp_path))
    first = evaluated(record, 0, TEXTS, FIRST)
    record.log(1, Snapshot())
    second = evaluated(record, 2, TEXTS, SECOND)
    record.finish()
    record.close()
    assert (first["eval/accuracy"], first["eval/reward"]) == (0.25, 0.5)  # of four verdicts, and of five rewards
    assert first["eval/unscored"] == pytest.approx(2 / 6)
    assert (second["eval/accuracy"], second["eval/reward"]) == (pytest.approx(4 / 6), pytest.approx(4.25 / 6))
    return tmp_path / "one"


def test_evaluations_record_held_out_answers(recorded: Path):
    rows = [json.loads(line) for line in (recorded / HELD_OUT).read_text().splitlines()]
    assert [row["step"] for row in rows] == [0] * 6 + [2] * 6
    assert rows[1] == {
        "step": 0, "problem": 1, "prompt": "1 + 1 =", "target": "2", "response": "two", "reward": 0.25,
        "correct": False, "tokens": 4, "finish": "stop",
    }  # fmt: skip
    assert (rows[4]["reward"], rows[4]["correct"]) == (None, None)


def test_held_out_answers_are_paged_and_filtered(recorded: Path):
    answers = Answers(recorded / HELD_OUT)
    answers.refresh()
    page = answers.page({})
    assert (page["steps"], page["step"], page["total"], page["all"]) == ([0, 2], 2, 6, 6)
    assert [row["before"] for row in page["rows"]] == [False, False, False, True, None, None]
    assert [row["problem"] for row in answers.page({"step": "0", "verdict": "right"})["rows"]] == [3]
    assert [row["problem"] for row in answers.page({"step": "0", "verdict": "unknown"})["rows"]] == [4, 5]
    assert answers.page({"verdict": "wrong", "page": "1"})["rows"] == []
    with (recorded / HELD_OUT).open("a") as file:
        file.write('{"step": 3, "problem": 0, "response": "' + "x" * 9000 + '"}\n{"step": 4, "pro')
    answers.refresh()
    [row] = answers.page({})["rows"]
    assert (row["step"], len(row["response"])) == (3, 4000)


def test_resumed_run_records_each_evaluation_once(recorded: Path):
    record = Run("one", {}, steps=4, root=str(recorded.parent), resume="a checkpoint", start=1)
    evaluated(record, 2, TEXTS, FIRST)
    record.close()
    rows = [json.loads(line) for line in (recorded / HELD_OUT).read_text().splitlines()]
    assert [row["step"] for row in rows] == [0] * 6 + [2] * 6
    assert rows[6]["correct"] is False


@pytest.mark.parametrize("finished", [True, False])
def test_run_report_shows_end_reason_and_held_out_answers(tmp_path: Path, finished: bool):
    record = Run("one", {}, steps=4, root=str(tmp_path))
    evaluated(record, 0, TEXTS, FIRST)
    if finished:
        record.finish()
    else:
        record.fail("KeyError: 'answer'", "Traceback")
    record.close()
    page = (tmp_path / "one/report.html").read_text()
    assert ('"state":"finished"' in page) is finished
    assert ('"state":"failed"' in page) is not finished
    assert ("failed: KeyError: 'answer'" in page) is not finished
    assert '"state":"running"' not in page
    assert '"response":"five"' in page
