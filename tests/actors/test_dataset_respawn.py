"""A dataset that is killed at any moment hands out what it would have: no prompt lost, none twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge.actors import DatasetActor
from forge.controller import Unrecoverable
from forge.data.tokenizer import character_tokenizer
from forge.types import Episode
from tests.actors.respawn import request, started

TASK = {"task": "apps.toys.words:Reverse", "difficulty": [2, 3], "prompt_template": "{question}>"}
CALLS = 18


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    character_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "rows.jsonl"
    lines = [{"question": "q" * (3 + 9 * (i % 4 == 3)) + str(i), "answer": str(i)} for i in range(11)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return {"path": str(path), "max_prompt_tokens": 8}


@pytest.mark.parametrize("floor", [0, 1 << 20])
@pytest.mark.parametrize("source", ["task", "rows", "stream"])
@pytest.mark.parametrize("kill", ["before the entry was whole", "before the answer", "after the answer"])
def test_kills_change_nothing(tokenizer: str, rows: Any, tmp_path: Path, source: str, kill: str, floor: int):
    data = {"task": TASK, "rows": rows, "stream": {**rows, "streaming": True}}[source]
    path = tmp_path / "run" / "dataset.journal"

    def make(incarnation: int) -> DatasetActor:
        actor = DatasetActor(tokenizer, journal=str(path), **data)
        actor.ledger.FLOOR = floor  # type: ignore[misc]
        return started(actor, incarnation)

    calm, hit = started(DatasetActor(tokenizer, **data)), make(0)
    for number in range(1, CALLS + 1):
        expected, before = calm.sample(), path.stat().st_size
        with request(f"request {number}"):
            assert hit.sample() == expected
            if number % 3 == 0:
                if kill == "before the entry was whole" and path.stat().st_size > before > 0:
                    path.write_bytes(path.read_bytes()[: (path.stat().st_size + before) // 2])
                hit = make(number)
                if kill != "after the answer":
                    assert hit.sample() == expected
        assert hit.state_dict() == calm.state_dict()


TEACHING = {
    "supervised": {"kind": "supervised", "max_tokens": 9, **TASK},
    "preferences": {"kind": "preferences", **TASK},
    "mixture": {
        "kind": "preferences",
        "prompt_template": "{question}>",
        "sources": [{"task": "apps.toys.numbers:Add"}, {"task": "apps.toys.words:Sort"}],
    },
}


@pytest.mark.parametrize("floor", [0, 1 << 20])
@pytest.mark.parametrize("data", TEACHING)
def test_kills_change_no_episode_of_any_kind(tokenizer: str, tmp_path: Path, data: str, floor: int):
    settings, path = TEACHING[data], tmp_path / "journal"

    def make(incarnation: int, journal: str | None) -> DatasetActor:
        actor = DatasetActor(tokenizer, journal=journal, **settings)
        actor.ledger.FLOOR = floor  # type: ignore[misc]
        return started(actor, incarnation)

    def draw(actor: DatasetActor) -> list[Episode]:
        return actor.supervised(3) if actor.kind == "supervised" else actor.pairs(3)

    calm, hit = make(0, None), make(0, str(path))
    for number in range(1, 13):
        expected = draw(calm)
        assert len(expected) == (3 if data == "supervised" else 6)
        with request(f"request {number}"):
            assert draw(hit) == expected
            if number % 3 == 0:
                whole = path.read_bytes()
                if number % 2:
                    path.write_bytes(whole[:-7])  # it died before the entry was whole
                hit = make(number, str(path))
                assert draw(hit) == expected
        assert hit.state_dict() == calm.state_dict()


def test_pairs_alternate(tokenizer: str):
    actor = started(DatasetActor(tokenizer, **TEACHING["preferences"]))
    episodes = actor.pairs(4)
    for chosen, rejected in zip(episodes[::2], episodes[1::2], strict=True):
        question, right = character_tokenizer().decode(chosen.tokens).removesuffix("<eos>").split(">")
        assert right == question[::-1]
        same, wrong = character_tokenizer().decode(rejected.tokens).removesuffix("<eos>").split(">")
        assert (same, wrong != right) == (question, True)


@pytest.mark.parametrize(
    ("kind", "ask", "message"),
    [
        ("preferences", lambda actor: actor.sample(), "sample needs a dataset of kind prompts; this one is of pref"),
        ("preferences", lambda actor: actor.supervised(1), "supervised needs a dataset of kind supervised"),
        ("prompts", lambda actor: actor.pairs(1), "pairs needs a dataset of kind preferences; this one is of prompts"),
    ],
)
def test_each_kind_answers_to_its_own(tokenizer: str, kind: Any, ask: Any, message: str):
    with pytest.raises(ValueError, match=message):
        ask(started(DatasetActor(tokenizer, kind=kind, **TASK)))


def test_the_end_of_the_data_says_so(tokenizer: str, rows: dict[str, Any]):
    actor = started(DatasetActor(tokenizer, kind="supervised", path=rows["path"], epochs=2))
    assert len(actor.supervised(22)) == 22
    with pytest.raises(ValueError, match="the data has ended: raise or unset epochs"):
        actor.supervised(1)


def test_a_loaded_position_survives(tokenizer: str, tmp_path: Path):
    def make(incarnation: int) -> DatasetActor:
        return started(DatasetActor(tokenizer, journal=str(tmp_path / "journal"), **TASK), incarnation)

    first = make(0)
    position = first.state_dict()
    expected = [first.sample() for _ in range(3)]
    with request("load"):
        first.load_state_dict(position)
    assert make(1).sample() == expected[0]
    second = make(2)
    with request("load"):  # its answer was lost, and others have drawn since
        second.load_state_dict(position)
    assert [second.sample() for _ in range(2)] == expected[1:]


def test_an_error_in_the_data_does_not_stop_those_after_it_from_being_taken_up(
    tokenizer: str, rows: dict[str, Any], tmp_path: Path
):
    def make(incarnation: int) -> DatasetActor:
        settings = {**rows, "streaming": True, "shuffle": False, "too_long": "error"}
        actor = DatasetActor(tokenizer, journal=str(tmp_path / "journal"), **settings)
        return started(actor, incarnation)

    def draw(actor: DatasetActor, name: str) -> str:
        with request(name):
            return actor.sample().target

    first = make(0)
    assert [draw(first, name) for name in "abc"] == ["0", "1", "2"]
    with pytest.raises(ValueError, match="row 4: the prompt has 13 tokens, max_prompt_tokens is 8"):
        draw(first, "d")
    assert draw(first, "e") == "4"
    second = make(1)
    assert [draw(second, name) for name in "cef"] == ["2", "4", "5"]


def test_without_a_journal_a_loss_is_the_end_and_says_what_to_set(tokenizer: str):
    with pytest.raises(Unrecoverable, match=r"DatasetActor\[0\] was replaced and the position .* journal="):
        started(DatasetActor(tokenizer, **TASK), 1)
