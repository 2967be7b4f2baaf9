"""Replays of runs: the same bits, whatever the number of generators; and what differs is named with its step."""

import hashlib
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge.config import ConfigError
from forge.observability.schedule import seal_line
from forge_envs import Action, Environment, Step
from forge_inspect.replay import replay_run
from tests.recipes.test_recipes import CONFIG, finish, start

pytestmark = [pytest.mark.processes, pytest.mark.full]

STEPS = 8
ASYNCHRONOUS = CONFIG | {
    "from_scratch": CONFIG["from_scratch"] | {"max_positions": 128},
    "training": CONFIG["training"] | {"steps": STEPS, "learning_rate": 3e-3, "seq_len": 512},
    "grpo": {"n_samples": 4, "max_tokens": 80},
    "reward": {"functions": ["tests.forge_inspect.test_replay:letters"], "accuracy": "ExactMatch"},
    "async": {"max_policy_age": 4},
    "checkpoint": {"every": 1, "keep": STEPS},
    "eval": {"problems": 0},
}


def letters(response: str) -> float:
    """Distinct letters: a reward that differs among the answers of almost every group."""
    return len(set(response)) / 26


class Echo(Environment):
    """Repeats what the policy says, and pays its letters."""

    async def reset(self, task: Any, *, seed: int) -> Step:
        return Step(({"role": "user", "content": "abc"},))

    async def step(self, action: Action) -> Step:
        return Step(({"role": "user", "content": action.content[:8] or "a"},), reward=letters(action.content))


def forge(*words: str) -> tuple[int, str]:
    return finish(sys.executable, "-m", "forge", *words)


def trained(root: Path, config: dict[str, Any], name: str = "test") -> Path:
    """The folder of a run."""
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config | {"run": {"name": name, "root": str(root / "runs")}}))
    code, output = forge("train", str(path))
    assert code == 0, output
    return root / "runs" / name


def states(folder: Path) -> dict[str, str]:
    """The sha256 of weights and optimiser after each step."""
    return {
        path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("checkpoints/step_*/__0_0.distcp"))
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An asynchronous run, with gradients in every step."""
    folder = trained(tmp_path_factory.mktemp("replayed"), ASYNCHRONOUS)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
    assert min(row["train/grad_norm"] for row in rows) > 0
    assert max(row["policy_age/max"] for row in rows) > 0
    return folder


def copied(run: Path, name: str) -> Path:
    """A copy of what a replay reads of a run."""
    folder = run.parent / name
    folder.mkdir()
    for file in ("config.yaml", "metrics.jsonl", "schedule.jsonl", "origin.json"):
        shutil.copy2(run / file, folder)
    shutil.copytree(run.parent / "test-initial", run.parent / f"{name}-initial")
    return folder


def test_replay_reproduces_run_bit_for_bit(run: Path) -> None:
    code, output = forge("replay", str(run), "--replicas", "3")
    assert code == 0, output
    assert f"steps 1 to {STEPS} equal the run's, bit for bit" in output
    assert states(run.parent / "test-replay") == states(run)
    assert len(states(run)) == STEPS


@pytest.mark.parametrize(
    ("step", "path", "value", "message"),
    [
        (3, ("groups", 1, 2, 0, 3), "0" * 16, "step 3: sample 0 of prompt"),
        pytest.param(5, ("groups", 1, 2, 0, 2), 0.25, "step 5: sample 0 of prompt", marks=pytest.mark.slow),
        pytest.param(6, ("numbers", "train/loss"), 0.25, "step 6: train/loss was 0.25", marks=pytest.mark.slow),
    ],
)
def test_replay_names_step_of_edited_schedule_entry(
    run: Path, step: int, path: tuple[Any, ...], value: Any, message: str
) -> None:
    folder = copied(run, f"edited{step}")
    lines = [json.loads(line) for line in (folder / "schedule.jsonl").read_text().splitlines()]
    part = next(line for line in lines if line["step"] == step and "groups" in line)
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    (folder / "schedule.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    code, output = forge("replay", str(folder))
    assert code == 1
    assert f"(step {step}) was changed after the run wrote it: its checksum differs" in output
    # Even if the checksum fits, the replay finds it.
    sealed = [seal_line({key: part for key, part in line.items() if key != "checksum"}) for line in lines]
    (folder / "schedule.jsonl").write_text("".join(f"{line}\n" for line in sealed))
    code, output = forge("replay", str(folder))
    assert code == 1
    assert message in output


@pytest.mark.slow
def test_replay_reproduces_killed_and_resumed_run(tmp_path: Path) -> None:
    config = ASYNCHRONOUS | {"checkpoint": {"every": 3, "keep": STEPS}, "generator": {"slots": 2}}
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(config | {"run": {"name": "test", "root": str(tmp_path / "runs")}}))
    metrics = tmp_path / "runs/test/metrics.jsonl"
    process = start(sys.executable, "-m", "forge", "train", str(path), group=True)
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 6:  # step 0 has a line as well
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    code, output = forge("train", str(path), "--resume", str(tmp_path / "runs/test"))
    assert code == 0, output
    assert "resuming from" in output
    code, output = forge("replay", str(tmp_path / "runs/test"))
    assert code == 0, output
    assert states(tmp_path / "runs/test-replay") == states(tmp_path / "runs/test")
    assert len(states(tmp_path / "runs/test")) == 3


def test_replay_reproduces_environment_episodes(tmp_path: Path) -> None:
    config = ASYNCHRONOUS | {
        "environment": "tests.forge_inspect.test_replay:Echo",
        "episode": {"max_turns": 3, "max_tokens": 100, "template": "plain"},
        "grpo": {"n_samples": 4, "max_tokens": 24},
        "training": ASYNCHRONOUS["training"] | {"steps": 4},
    }
    folder = trained(tmp_path, {key: value for key, value in config.items() if key != "reward"})
    code, output = forge("replay", str(folder), "--replicas", "1")
    assert code == 0, output
    assert states(tmp_path / "runs/test-replay") == states(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"until": 99}, "--until must be a step of the schedule, 1 to 8"),
        ({"replicas": 0}, "num_replicas"),
    ],
)
def test_replay_of_unreplayable_run_raises_before_start(run: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        replay_run(run, **settings)


def test_replay_of_run_without_schedule_raises_one_line_error(tmp_path: Path) -> None:
    code, output = forge("replay", str(tmp_path))
    assert code == 1
    assert len(output.strip().splitlines()) == 1
    assert "has no schedule.jsonl: only RL runs of this version can be replayed" in output
