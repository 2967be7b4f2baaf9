"""Environments of real packages, each in another Python that a variable names; skipped without it."""

import asyncio
import json
import os

import pytest
import yaml

pytest.importorskip("openai")

import forge
from forge.types import Prompt, Sample
from forge_agents.cli import write_rows
from forge_agents.collection import WorkerPlay, read_rows
from forge_agents.config import AgentConfig
from forge_agents.record import EXCLUSIONS
from forge_agents.settings import SessionSettings

pytestmark = pytest.mark.processes
HERE = os.path.join(os.path.dirname(__file__), "collections")
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '>' }}{% endfor %}"


def agent_of(kind, environment, **settings):
    """The section of an environment; skips the test where its package is not installed."""
    variable = f"FORGE_{kind.upper()}_PYTHON"
    if variable not in os.environ:
        pytest.skip(f"{variable} names no Python with {kind}")
    args = settings.pop("args", {})
    collection = {"kind": kind, "environment": environment, "python": os.environ[variable], "args": args}
    return AgentConfig(collection=collection, **settings)


def played(served, agent, *answers):
    """The outcomes and episodes of tasks that are played at once, in one worker."""
    gateway, run = served

    async def play_all():
        play = WorkerPlay(agent)
        try:
            return await asyncio.gather(*(play_one(play, answer) for answer in answers))
        finally:
            await play.close()

    async def play_one(play, answer):
        access = gateway.open(SessionSettings(max_tokens=1000, max_turn_tokens=100))
        outcome = await play(access, Sample(Prompt("", ()), json.dumps(answer)))
        record = await asyncio.to_thread(lambda: run(gateway.close(access.key)))
        return outcome, record.episode("policy", outcome.reward)

    return asyncio.run(play_all())


def sums(**settings):
    args = {"agent": {"runtime": {"type": "subprocess"}}, "taskset": {"number": 6}} | settings.pop("args", {})
    return agent_of(
        "verifiers", "forge_sums", args=args, env={"PYTHONPATH": HERE} | settings.pop("env", {}), **settings
    )


def test_verifiers_library_environment_scores_by_rubric(served, forced_policy):
    agent = sums()
    rows = asyncio.run(read_rows(agent))
    assert [row["question"] for row in rows["train"]] == [f"{n}+{n}" for n in range(6)]
    assert rows["eval"] == []
    # The right sum of even numbers, and one more of odd ones.
    forced_policy.script = lambda prompt: next(str(2 * n + n % 2) for n in range(6) if f"{n}+{n}" in prompt)
    results = played(served, agent, *(row["answer"] for row in rows["train"]))
    assert [outcome.reward for outcome, _ in results] == [1.0, 0.0] * 3
    for outcome, episode in results:
        assert outcome.info["metrics"] == {
            "length": float(len(episode.info["messages"][-1]["content"])),
            "right": outcome.reward,
        }
        assert (episode.info["turns"], episode.info["roots"]) == (2, {"start": 1})
    assert sum(episode.info["certificate"]["trained"] for _, episode in results) == forced_policy.sampled


def test_verifiers_library_run_survives_killed_worker(tmp_path):
    agent = sums(env={"FORGE_SUMS": "die", "FORGE_SUMS_MARK": str(tmp_path / "mark")})
    config = {
        "from_scratch": {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "max_positions": 128},
        "dataset": {"path": str(tmp_path / "train.jsonl")},
        "eval": {"path": str(tmp_path / "eval.jsonl"), "problems": 1},
        "episode": {
            "max_turns": 3,
            "max_tokens": 96,
            "template": TEMPLATE,
            "agent": agent.model_dump(exclude_unset=True),
        },
        "training": {"batch_size": 2, "steps": 2, "learning_rate": 1e-3, "seq_len": 256},
        "grpo": {"n_samples": 3, "max_tokens": 8},
        "run": {"name": "run", "root": str(tmp_path)},
    }
    file = tmp_path / "agent.yaml"
    file.write_text(yaml.safe_dump(config))
    assert write_rows(file, share=0.3).split()[1:2] == ["rows"]
    held_out = [json.loads(line)["question"] for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    trained = [json.loads(line)["question"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert {*held_out, *trained} == {f"{n}+{n}" for n in range(6)}
    assert held_out
    assert trained
    assert not {*held_out} & {*trained}
    rows = forge.train(None, **config).metrics
    counted = [row for row in rows if "certificate/sampled" in row]
    assert sum(row["certificate/trained"] for row in counted) > 0
    for row in counted:
        excluded = sum(row.get(f"certificate/{name}", 0) for name in EXCLUSIONS)
        assert row["certificate/sampled"] == row["certificate/trained"] + excluded
    # The first turns of the episodes that were lost with it.
    assert (tmp_path / "mark").exists()
    assert sum(row["certificate/orphan"] + row["certificate/unscored"] for row in counted) > 0
    assert all(row.get("episode/unscored", 0) == 0 for row in rows)
