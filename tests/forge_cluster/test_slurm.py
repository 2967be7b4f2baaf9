"""Jobs of a real Slurm: however they are interrupted, they end with the weights of a run that was not."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forge_cluster.machines import ROOT, environment, trained
from tests.forge_cluster.slurm import Slurm, missing, requeue_now

pytestmark = [pytest.mark.processes, pytest.mark.full, pytest.mark.skipif(bool(missing()), reason=str(missing()))]
CONFIG = "tests/forge_cluster/tiny.yaml"


@pytest.fixture
def slurm(machines_missing, tmp_path) -> Iterator[Slurm]:
    if machines_missing:
        pytest.skip(machines_missing)
    with Slurm(4, shared=[ROOT, sys.prefix, tmp_path]) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> str:
    """The weights of the same run on this machine."""
    root = tmp_path_factory.mktemp("undisturbed")
    command = [sys.executable, "-m", "forge", "train", CONFIG, "--run.root", str(root)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return trained(root / "tiny")


class Submitted:
    """A job of `forge launch slurm`, and what it has written."""

    def __init__(self, slurm: Slurm, root: Path, *words: str) -> None:
        command = [sys.executable, "-m", "forge", "launch", "slurm", CONFIG, "--partition", "low"]
        command += [*words, "--run.root", str(root)]
        said = slurm.say(*command, cwd=str(ROOT), env={**slurm.environment, **environment()} | slurm.environment)
        found = re.match(r"submitted job (\d+)", said)
        assert found, said
        self.slurm, self.root, self.job = slurm, root, found[1]

    @property
    def output(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.root.glob("slurm-*.out")))

    def step(self, number: int) -> None:
        """Wait for a checkpoint of this step."""
        folder = self.root / "tiny" / "checkpoints"
        done = lambda: any(path.name >= f"step_{number:06d}" for path in folder.glob("step_*"))  # noqa: E731
        try:
            self.slurm.wait(done, 180, f"checkpoint {number}")
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.output[-4000:]}") from None

    def state(self) -> str:
        return self.slurm.state(self.job)

    def ends(self, state: str = "COMPLETED", seconds: float = 240) -> None:
        end = time.monotonic() + seconds
        while (now := self.state()) != state:
            assert now not in ("FAILED", "NODE_FAIL", "TIMEOUT"), f"{now}\n{self.output[-4000:]}"
            assert time.monotonic() < end, f"{now} after {seconds:g} s\n{self.output[-4000:]}"
            if now == "PENDING" and " Restarts=0 " not in self.slurm.say("scontrol", "show", "job", self.job):
                requeue_now(self.slurm, self.job)
            time.sleep(0.5)


def test_slurm_job_result_equals_uninterrupted_run(slurm, tmp_path, undisturbed):
    job = Submitted(slurm, tmp_path, "--nodes", "2")
    job.ends()
    assert trained(tmp_path / "tiny") == undisturbed
    assert not list(tmp_path.glob("hosts-*"))


def test_preempted_slurm_job_saves_and_resumes(slurm, tmp_path, undisturbed):
    job = Submitted(slurm, tmp_path, "--nodes", "2")
    job.step(2)
    other = slurm.say("sbatch", "--parsable", "--partition=high", "--nodes=3", "--exclusive", "--wrap", "sleep 2")
    job.ends()
    assert "SIGTERM at every host: the run ended after step" in job.output
    assert slurm.state(other) == "COMPLETED"
    assert trained(tmp_path / "tiny") == undisturbed


def test_slurm_job_survives_lost_node(slurm, tmp_path, undisturbed):
    job = Submitted(slurm, tmp_path, "--nodes", "3")
    job.step(2)
    slurm[2].kill()  # the second of three: the first runs the controller
    job.ends()
    assert " is dead " in job.output  # whoever noticed it first
    assert trained(tmp_path / "tiny") == undisturbed
