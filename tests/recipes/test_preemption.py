"""A run that has to end early saves itself, says so by its exit code, and ends with the same weights when resumed."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime, timedelta

import pytest

from forge.recipes.preemption import Preemption, deadline_of
from tests.forge_cluster.machines import ROOT, environment, trained, wait_until
from tests.recipes.test_recipes import run_here
from tests.trees import descendants

COMMAND = [sys.executable, "-m", "apps.grpo.main", "--config", "tests/forge_cluster/tiny.yaml"]
LOCAL = ["--services.trainer.procs", "1", "--services.generator.num_replicas", "1", "--training.steps", "6"]
HOSTS = ["--services.trainer.hosts", "1", "--services.generator.hosts", "1"]
NO_HOSTS = ["--services.trainer.hosts", "null", "--services.generator.hosts", "null"]


def test_run_deadline_is_read_from_setting_or_slurm(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert deadline_of(None) is None
    assert deadline_of(100.0) == pytest.approx(time.time() + 100, abs=5)
    tomorrow = datetime.now() + timedelta(days=1)
    assert deadline_of(tomorrow.isoformat()) == pytest.approx(tomorrow.timestamp())
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1900000000")
    assert deadline_of(None) == 1_900_000_000
    with pytest.raises(
        ValueError, match=r"run.save_before must be a number of seconds or a date and time .* got 'soon'"
    ):
        deadline_of("soon")


def test_signal_or_near_deadline_requests_preemption():
    assert Preemption().reason() is None
    assert Preemption(time.time() + 3600).reason() is None
    near = Preemption(time.time() + 5)
    assert near.reason() is None  # before its first step a run would never get on
    assert "the time limit" in near.reason()
    asked = Preemption(time.time() + 3600)
    asked.request("SIGUSR1")
    assert asked.reason() == "SIGUSR1"
    slow = Preemption(time.time() + 100)
    assert [slow.reason(), slow.reason()] == [None, None]
    slow.saved(60.0)  # another step might end in time, its checkpoint would not
    assert "the time limit" in slow.reason()


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize(
    "how",
    ["SIGTERM to all", *(pytest.param(name, marks=pytest.mark.slow) for name in ("deadline", "SIGTERM", "SIGUSR1"))],
)
def test_preempted_run_resumes_with_equal_weights(how, tmp_path, whole):
    common = [*COMMAND, *LOCAL, "--run.root", str(tmp_path)]
    own = [*common, *HOSTS]
    if how == "deadline":
        done = subprocess.run(
            [*own, "--run.save_before", "1"], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
        )
        code, said = done.returncode, done.stderr
    else:
        process = subprocess.Popen(own, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)
        rows = tmp_path / "tiny" / "metrics.jsonl"
        if how != "SIGUSR1":  # it is remembered from the start
            wait_until(lambda: rows.exists() and bool(rows.read_text()), 120, "the first row")
        else:
            wait_until(rows.exists, 120, "the run's folder")
        members = descendants(process.pid) if how.endswith("all") else [process.pid]  # systemd and scancel reach all
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, getattr(signal, how.split()[0]))
        said, code = process.communicate(timeout=120)[1], process.returncode
    assert code == 75, said
    assert "Traceback" not in said
    assert " is dead " not in said
    run_here(*common, *NO_HOSTS, "--resume", "auto")
    assert trained(tmp_path / "tiny") == whole


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> str:
    """The weights of the run that nothing interrupts."""
    root = tmp_path_factory.mktemp("whole")
    run_here(*COMMAND, *LOCAL, *NO_HOSTS, "--run.root", str(root))
    return trained(root / "tiny")
