"""A run whose processes are killed goes on as if nothing had happened, and ends with everything done once."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from forge.recipes.result import Result
from forge.training.checkpoint import list_checkpoints, read_extra
from tests.recipes.test_recipes import CONFIG, command, gone, rows, start
from tests.trees import components

pytestmark = [pytest.mark.processes, pytest.mark.full]

STEPS = 72
SURVIVOR = CONFIG | {
    "training": CONFIG["training"] | {"steps": STEPS},
    "checkpoint": {"every": 6},
    "metrics": {"rollouts": CONFIG["training"]["batch_size"]},
}


def logged_rollouts(folder: Path) -> list[dict]:
    return Result(folder / "runs/test").rollouts


def wait(process, folder, step):
    deadline = time.monotonic() + 90
    while not (folder / "runs/test/metrics.jsonl").exists() or len(rows(folder)) <= step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.05)


def test_run_survives_kill_of_each_process(tmp_path):
    overrides = ["--async.max_policy_age", "1", "--trainer.procs", "2"]
    process = start(*command(tmp_path, *overrides, config=SURVIVOR), group=True)
    try:
        wait(process, tmp_path, 2)
        victims = components(process.pid)
        assert len(victims) == 5  # two generators, two ranks of the trainer, the reward
        for number, pid in enumerate(victims):
            wait(process, tmp_path, 2 + 6 * number)
            if Path(f"/proc/{pid}").exists():  # the other rank went with the first
                os.kill(pid, signal.SIGKILL)
        last = components(process.pid)
        output, _ = process.communicate(timeout=200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-3000:]
    dead = set(re.findall(r"(\w+)\[\d\] is dead", output))
    assert dead >= {"generator", "trainer", "reward_actor"}
    assert [row["step"] for row in rows(tmp_path)] == list(range(STEPS + 1))
    logged = logged_rollouts(tmp_path)
    batch_size, n_samples = CONFIG["training"]["batch_size"], CONFIG["grpo"]["n_samples"]
    assert [rollout["step"] for rollout in logged] == [1 + i // batch_size for i in range(STEPS * batch_size)]
    # What a kill delayed until it was too old was dropped, counted, and replaced by a group of a new number.
    last_checkpoint = list_checkpoints(tmp_path / "runs/test/checkpoints")[-1]
    dropped = read_extra(last_checkpoint)["buffer"]["dropped"]["too_old"]
    indices = {rollout["index"] for rollout in logged}
    assert len(indices) == STEPS * batch_size
    assert len(set(range(max(indices) + 1)) - indices) == dropped
    assert all(len(rollout["rewards"]) == n_samples for rollout in logged)
    assert all(rollout["step"] - 1 - rollout["version"] <= 1 for rollout in logged)
    assert sum(row.get("restarts/generator", 0) for row in rows(tmp_path)) == 2
    assert last_checkpoint.name == f"step_{STEPS:06d}"
    assert (tmp_path / "runs/test/model/config.json").exists()
    assert gone(last)


def test_lost_trainer_without_checkpoints_ends_run(tmp_path):
    process = start(*command(tmp_path, "--checkpoint.every", "0", config=SURVIVOR), group=True)
    try:
        wait(process, tmp_path, 2)
        pids = components(process.pid)
        for pid in pids:  # one of them is the trainer
            os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 1
    assert re.search(r"error: no replica of trainer is left.*set checkpoint\.every", output), output[-3000:]
    assert gone(pids)
