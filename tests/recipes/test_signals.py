"""What a terminal, a scheduler or a user does to a run in each of its phases: one line, nothing left, and a resume."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.forge_cluster.machines import ROOT, environment, trained, wait_until
from tests.recipes.test_recipes import run_here
from tests.trees import descendants

pytestmark = [pytest.mark.processes, pytest.mark.full]

COMMAND = [sys.executable, "-m", "forge", "train", "tests/forge_cluster/tiny.yaml"]
LOCAL = ["--services.trainer.procs", "1", "--services.trainer.hosts", "null", "--services.generator.num_replicas", "1"]
LOCAL += ["--services.generator.hosts", "null", "--training.steps", "3"]
HELD = Path(__file__).parent / "held"
PHASES = ("start-up", "first step", "checkpoint", "export", "report")
ENDINGS = ("SIGINT", "SIGINT twice", "SIGTERM", "SIGKILL to all")
# This one is tested often, the others in the tier of slow tests.
OFTEN = {("checkpoint", "SIGINT twice")}


def send(process: subprocess.Popen, ending: str) -> None:
    name, *more = ending.split()
    pids = descendants(process.pid) if ending.endswith("all") else [process.pid]
    for _ in range(2 if more == ["twice"] else 1):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, getattr(signal, name))
        if more == ["twice"]:
            wait_until(lambda: process.poll() is not None or said(process, name), 60, "a line")


def said(process: subprocess.Popen, text: str) -> bool:
    return text in Path(process.output).read_text()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("whole")
    run_here(sys.executable, "-m", "apps.grpo.main", "--config", COMMAND[-1], *LOCAL, "--run.root", str(root))
    return trained(root / "tiny")


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """The folder for temporary files of both runs."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    return folder


def leftovers(temporary: Path, pid: int) -> list[Path]:
    return [*temporary.glob("forge-*"), *Path("/dev/shm").glob(f"forge-*-{pid}-*")]


@pytest.fixture
def interrupted(tmp_path: Path, temporary: Path) -> Callable[[str, str], tuple[int, list[str], int]]:
    """A run that is interrupted in a phase: its exit code, its lines and its process id."""

    def run(phase: str, ending: str) -> tuple[int, list[str], int]:
        own = environment(HOLD=phase, MARK=str(tmp_path / "mark"), TMPDIR=str(temporary))
        own["PYTHONPATH"] = os.pathsep.join([str(HELD), own["PYTHONPATH"]])
        output = tmp_path / "output"
        with output.open("w") as file:
            process = subprocess.Popen(
                [*COMMAND, *LOCAL, "--run.root", str(tmp_path)],
                cwd=ROOT,
                env=own,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        process.output = output  # type: ignore[attr-defined]
        wait_until(lambda: (tmp_path / "mark").exists() or process.poll() is not None, 120, phase)
        pids = descendants(process.pid)
        send(process, ending)
        code = process.wait(300)
        wait_until(lambda: not any(map(alive, pids)), 60, "the end of all")
        if ending not in ("SIGKILL to all", "SIGINT twice"):  # the next run sweeps their folders
            wait_until(lambda: not leftovers(temporary, process.pid), 60, "an end without folders")
        return code, output.read_text().splitlines(), process.pid

    return run


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    with suppress(FileNotFoundError, ProcessLookupError):
        return status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


@pytest.mark.parametrize(
    ("phase", "ending"),
    [
        pytest.param(phase, ending, marks=() if (phase, ending) in OFTEN else pytest.mark.slow)
        for phase in PHASES
        for ending in ENDINGS
    ],
)
def test_interrupted_run_shuts_down_cleanly_in_every_phase(
    phase: str,
    ending: str,
    tmp_path: Path,
    temporary: Path,
    interrupted: Callable[[str, str], tuple[int, list[str], int]],
    uninterrupted: str,
):
    code, lines, pid = interrupted(phase, ending)
    name = ending.split()[0]
    finishes = phase == "report" or (phase == "export" and ending == "SIGTERM")
    codes = {"SIGINT": 130, "SIGINT twice": 130, "SIGTERM": 0 if finishes else 75, "SIGKILL to all": -9}
    assert code == codes[ending], lines
    assert not [line for line in lines if "Traceback" in line or "Exception ignored" in line], lines
    assert sum(f"forge: {name}" in line for line in lines) == (name != "SIGKILL"), lines
    again = subprocess.run(
        [*COMMAND, *LOCAL, "--run.root", str(tmp_path), "--resume", "auto"],
        cwd=ROOT,
        env=environment(TMPDIR=str(temporary)),
        capture_output=True,
        text=True,
    )
    assert again.returncode == 0, again.stderr
    assert not leftovers(temporary, pid)
    assert trained(tmp_path / "tiny") == uninterrupted


@pytest.mark.parametrize("ending", ["SIGINT", "SIGTERM"])
def test_signal_during_imports_ends_with_one_line_message(
    ending: str, interrupted: Callable[[str, str], tuple[int, list[str], int]]
):
    code, lines, _ = interrupted("imports", ending)
    assert code == 128 + getattr(signal, ending)
    assert lines == [f"forge: {ending}: ended before the run started"]
