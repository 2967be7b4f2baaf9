"""The settings of collections, their rows, and what a worker's result becomes; without the packages."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("openai")

from forge.config import ConfigError
from forge.types import Prompt, Sample
from forge_agents import collection
from forge_agents.cli import write_rows
from forge_agents.collection import WorkerPlay, hold_out
from forge_agents.config import AgentConfig
from forge_agents.settings import Access

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("fork_server")]

SCRIPT = Path(__file__).with_name("collections") / "odd_worker.py"
ODD = {"kind": "verifiers", "environment": "odd", "python": sys.executable}


@pytest.fixture
def odd(monkeypatch):
    """The section of an environment that this Python has, instead of verifiers."""
    monkeypatch.setattr(collection, "SCRIPT", SCRIPT)
    return AgentConfig(collection=ODD)


def play(agent, target):
    """The outcome of an episode of a task."""

    async def run():
        worker_play = WorkerPlay(agent)
        try:
            return await worker_play(Access("http://gateway", "0" * 32), Sample(Prompt("", ()), target))
        finally:
            await worker_play.close()

    return asyncio.run(run())


@pytest.mark.parametrize("reward", ["null", "true", '"1"', "NaN", "Infinity"])
def test_non_numeric_agent_reward_marks_episode_as_lost(odd, reward):
    outcome = play(odd, f'{{"reward": {reward}}}')
    assert (outcome.reward, outcome.stop, outcome.is_lost) == (None, "infrastructure", True)
    assert "must be a finite number" in outcome.info["error"]


def test_agent_collection_hold_out_splits_rows_by_question():
    rows = [{"question": f"{n % 40}?", "answer": {"n": n}} for n in range(80)]
    train, held_out = hold_out(rows, 0.25)
    assert len(train) + len(held_out) == 80
    assert 4 <= len(held_out) <= 40
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    # The place of a row does not depend on others.
    again, _ = hold_out(rows[::2], 0.25)
    assert again == [row for row in train if row in rows[::2]]
    assert hold_out(rows, 0) == (rows, [])


def configured(tmp_path, agent, **settings):
    """A YAML file of a run whose rows are in the folder."""
    values = {
        "dataset": {"path": str(tmp_path / "rows/train.jsonl")},
        "eval": {"path": str(tmp_path / "rows/eval.jsonl")},
        "episode": {"agent": agent},
        **settings,
    }
    file = tmp_path / "agent.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def test_write_rows_writes_train_and_eval_files_of_config(tmp_path, odd):
    file = configured(tmp_path, {"collection": ODD})
    assert write_rows(file) == f"4 rows in {tmp_path}/rows/train.jsonl, 1 rows in {tmp_path}/rows/eval.jsonl"
    row = json.loads((tmp_path / "rows/train.jsonl").read_text().splitlines()[1])
    assert row == {"question": "question 1", "answer": '{"number": 1}'}
    with pytest.raises(ConfigError, match=r"exists: choose another dataset\.path, or pass --overwrite"):
        write_rows(file)
    # Of 4 rows, all are of the split for training: some are held out of it.
    write_rows(file, limit=4, share=0.5, overwrite=True)
    sizes = [len((tmp_path / f"rows/{name}.jsonl").read_text().splitlines()) for name in ("train", "eval")]
    assert sum(sizes) == 4
    assert min(sizes) > 0


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"collection": {**ODD, "python": "/no/bin/python"}},
            r"collection\.python /no/bin/python is not an executable",
        ),
        ({"collection": {**ODD, "kind": "others"}}, "kind"),
        ({"collection": ODD, "command": ["true"]}, r"episode\.agent needs one of .*, got command, collection"),
    ],
)
def test_invalid_agent_collection_settings_raise(settings, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        AgentConfig(**settings)
    assert "\n" not in str(caught.value)
