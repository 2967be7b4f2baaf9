"""What a run says when the machine takes something away from it: one line, and no traceback."""

import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.recipes.test_recipes import CONFIG, ROOT, command, start
from tests.system.disks import SmallDisk, small_disk

pytestmark = pytest.mark.processes

LONG = CONFIG | {"training": CONFIG["training"] | {"steps": 500}, "eval": {"problems": 8, "every": 1}}


def running(folder: Path, *overrides: str, disk: SmallDisk | None = None) -> subprocess.Popen:
    """A run that has made two steps, on a disk that only it sees."""
    words = command(folder, *overrides, config=LONG)
    if disk is not None:
        shutil.copy(folder / "config.yaml", disk.path)
        words = disk.inside(words, ROOT)
    process = start(*words)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2/"):
            return process
    raise AssertionError(process.communicate()[0])


def ended(process: subprocess.Popen) -> list[str]:
    output, _ = process.communicate(timeout=200)
    assert "Traceback" not in output, "\n".join(line for line in output.splitlines() if "[telemetry]" not in line)
    return output.splitlines()


@pytest.mark.slow
def test_removed_run_directory_ends_run_with_one_line_error(tmp_path: Path):
    process = running(tmp_path)
    (tmp_path / "runs/test").rename(tmp_path / "gone")  # at once: the run still writes into it
    assert f"error: {tmp_path}/runs/test was removed while the run used it" in ended(process)[-1]
    assert process.returncode == 1


@pytest.mark.full
def test_full_disk_ends_run_with_one_line_error(tmp_path: Path):
    small = tmp_path / "small"
    small.mkdir()
    with small_disk(small, "3m") as disk:
        process = running(small, "--checkpoint.every", "0", disk=disk)
        disk.fill()
        logs = rf"{small}/runs/test/(metrics\.jsonl|rollouts\.arrow|trace\.json)"
        said = rf"error: {logs} needs [\d,]+ bytes, and its disk has 0 free: No space left on device"
        assert re.fullmatch(said, ended(process)[-1])


@pytest.mark.slow
def test_sighup_ends_run_with_report(tmp_path: Path):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup a run would ignore it, as its parent does
    process = running(tmp_path)
    signal.signal(signal.SIGHUP, before)
    process.send_signal(signal.SIGHUP)
    assert "forge: SIGHUP: stopping" in "\n".join(ended(process))
    assert process.returncode == 128 + signal.SIGHUP
    assert {"report.html", "trace.json"} <= {path.name for path in (tmp_path / "runs/test").iterdir()}
