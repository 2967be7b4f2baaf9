"""Folders that go with their process, and what is found of those whose watcher was killed too."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge.janitor import MACHINE, Scratch, sweep

pytestmark = pytest.mark.processes

LEFT = """
import os, signal, sys
from forge.janitor import Scratch
scratch = Scratch("forge-run-", sys.argv[1])
(scratch.path / "file").touch()
print(scratch.path, flush=True)
if sys.argv[2] == "killed":
    scratch._watcher.kill()  # as the end of a control group does
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `sweep` looks, beside the usual folders."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def begin(base: Path, how: str) -> tuple[subprocess.Popen, Path]:
    words = [sys.executable, "-c", LEFT, str(base), how]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_dead_process_left_is_removed_and_nothing_else(base: Path):
    dead, left = begin(base, "killed")
    assert dead.wait() == -signal.SIGKILL
    living, used = begin(base, "lives")
    (base / "forge-run-note").write_text("a file")
    (base / "forge-run-link").symlink_to(used)
    (base / "forge-other").mkdir()
    assert left in sweep()
    assert not left.exists()
    assert used.is_dir()
    assert {path.name for path in base.iterdir()} == {"forge-run-note", "forge-run-link", "forge-other", used.name}
    living.communicate()
    deadline = time.monotonic() + 60  # its shell removes the folder once it sees the end of the process
    while used.exists():
        assert time.monotonic() < deadline, "the folder outlived its process"
        time.sleep(0.02)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_folders_of_another_user_are_left_alone_however_deep(base: Path):
    deep = base / f"forge-weights-1-{MACHINE}-x"
    deep.mkdir()
    handle = os.open(deep, os.O_RDONLY)
    for _ in range(3000):  # deeper than a path may be, and than Python recurses
        os.mkdir("d", dir_fd=handle)
        below = os.open("d", os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = below
    os.close(handle)
    os.chown(deep, 21002, 21002)
    assert deep not in sweep()
    assert deep.is_dir()
    os.chown(deep, 0, 0)
    sweep()  # one's own may fail, with a warning; it ends no run
    subprocess.run(["rm", "-rf", str(deep)], check=True)


def test_folders_of_other_hosts_and_of_earlier_versions_stay(base: Path):
    """Their processes may live: other hosts' locks are not seen here, and earlier versions had none."""
    for name in ("forge-run-12-ab3d5f-zkzjsmui", "forge-run-12-zkzjsmui", "forge-weights-12-zkzjsmui"):
        (base / name).mkdir()
        assert base / name not in sweep()
        assert (base / name).is_dir()


def test_two_that_sweep_at_once_do_not_warn(base: Path, monkeypatch, caplog: pytest.LogCaptureFixture):
    left = base / f"forge-run-1-{MACHINE}-x"
    left.mkdir()
    inode, lock = left.stat().st_ino, fcntl.flock

    def removed_by_the_other(handle: int, how: int) -> None:
        lock(handle, how)  # the usual folders may hold stores of runs beside this test
        if os.fstat(handle).st_ino == inode:
            left.rmdir()

    monkeypatch.setattr("fcntl.flock", removed_by_the_other)
    assert left not in sweep()
    assert not left.exists()
    assert not caplog.records


def test_a_folder_goes_with_close(base: Path):
    scratch = Scratch("forge-trackers-", base)
    assert scratch.path.name.startswith(f"forge-trackers-{os.getpid()}-{MACHINE}-")
    scratch.close()
    assert not list(base.iterdir())


def test_forge_clean_names_what_it_removes(base: Path):
    dead, left = begin(base, "killed")
    dead.wait()
    words = [sys.executable, "-c", "from forge.cli import main; main(['clean'])"]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"TMPDIR": str(base)}, check=True)
    assert f"removed {left}\n" in done.stdout
