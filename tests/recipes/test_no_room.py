"""A whole run on a small disk, with little shared memory, or with few descriptors: it ends in one line and resumes."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge.training.checkpoint import list_checkpoints
from tests.forge_cluster.machines import ROOT, environment, trained
from tests.system.disks import SmallDisk, small_disk

pytestmark = [pytest.mark.processes, pytest.mark.full]

COMMAND = [sys.executable, "-m", "forge", "train", "tests/forge_cluster/tiny.yaml"]
COMMAND += ["--services.trainer.procs", "1", "--services.trainer.hosts", "null", "--services.generator.hosts", "null"]
COMMAND += ["--services.generator.num_replicas", "1", "--reward.functions", "[tests.recipes.filling:Filling]"]
COMMAND += ["--metrics.rollouts", "all"]
CALLS = 8 * 4  # of the reward, in a step
NEEDS = r"needs [\d,]+ (?:free )?bytes, (?:but|and its disk) has [\d,]+"


def words(folder: Path, *overrides: str) -> list[str]:
    return [*COMMAND, "--run.root", str(folder), *overrides]


def ended(command: list[str], **variables: str) -> tuple[int, list[str]]:
    """The exit code of a program and the lines that it left on standard error, without those of a usual run."""
    done = subprocess.run(command, cwd=ROOT, env=environment(**variables), capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, [line for line in done.stderr.splitlines() if not line.startswith("Monarch internal logs")]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    (tmp_path / "disk").mkdir()
    with small_disk(tmp_path / "disk", "8m") as small:
        yield small


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("whole")
    assert ended(words(root)) == (0, [])
    return trained(root / "tiny")


@pytest.mark.parametrize(
    ("left", "name"),
    [
        *(pytest.param(left, "tiny-initial", marks=pytest.mark.slow) for left in (8192, 65_536)),
        (250_000, "tiny"),
    ],
)
def test_too_small_disk_raises_before_run_starts(left: int, name: str, disk: SmallDisk):
    disk.fill(left)
    code, lines = ended(disk.inside(words(disk.place), ROOT))
    assert code == 1
    assert len(lines) == 1, lines
    assert re.match(rf"error: {disk.place}/{name} {NEEDS}", lines[0])
    assert {path.name for path in disk.path.iterdir()} <= {"fill", "tiny-initial"}
    assert name != "tiny-initial" or not (disk.path / name).exists()


def test_too_small_shared_memory_raises_before_run_starts(tmp_path: Path):
    with small_disk(Path("/dev/shm"), "128k") as memory:
        code, lines = ended(memory.inside(words(tmp_path), ROOT))
        assert code == 1
        assert len(lines) == 1, lines
        assert "do not fit into shared memory, /dev/shm" in lines[0]
        assert [*memory.path.iterdir()] == []
    assert {path.name for path in tmp_path.iterdir()} <= {"tiny", "tiny-initial"}


@pytest.mark.parametrize("step", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_run_resumes_after_disk_filled_up(step: int, disk: SmallDisk, uninterrupted: str):
    fills = f"{disk.place}/fill:{step * CALLS + 1}"
    code, lines = ended(disk.inside(words(disk.place), ROOT), FILLS=fills)
    assert code == 1
    assert len(lines) == 1, lines
    named = r"/tiny/(?:\S+ needs|checkpoints/step_0\d+ could not be written)"
    assert re.match(rf"error: [^\n]*{named}", lines[0])
    assert re.search(r"needs [\d,]+ bytes, and its disk has [\d,]+ free", lines[0])
    assert [*(disk.path / "tiny").glob("**/*unfinished*")] == []
    assert list_checkpoints(disk.path / "tiny/checkpoints")
    disk.empty()
    assert ended(disk.inside(words(disk.place, "--resume", "auto"), ROOT)) == (0, [])
    assert trained(disk.path / "tiny") == uninterrupted
