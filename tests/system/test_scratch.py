"""Folders that go with their process, and what is found of those whose process was killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forge.system.scratch import MACHINE, Scratch, remove_tree, sweep_folders

pytestmark = pytest.mark.processes

LEFT = """
import os, signal, sys
from forge.system.scratch import Scratch
scratch = Scratch("forge-run-", sys.argv[1])
(scratch.path / "file").touch()
print(scratch.path, flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `sweep` looks, alongside the usual folders."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def begin(base: Path, how: str) -> tuple[subprocess.Popen, Path]:
    words = [sys.executable, "-c", LEFT, str(base), how]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_sweep_removes_only_directories_of_dead_processes(base: Path):
    dead, left = begin(base, "killed")
    assert dead.wait() == -signal.SIGKILL
    living, used = begin(base, "lives")
    (base / "forge-run-note").write_text("a file")
    (base / "forge-run-link").symlink_to(used)
    (base / "forge-other").mkdir()
    assert left in sweep_folders()
    assert not left.exists()
    assert used.is_dir()
    assert {path.name for path in base.iterdir()} == {"forge-run-note", "forge-run-link", "forge-other", used.name}
    living.communicate()
    assert not used.exists()


def test_sweep_keeps_directories_of_other_hosts_and_versions(base: Path):
    """Their processes may live: other hosts' locks are not seen here, and earlier versions had none."""
    for name in ("forge-run-12-ab3d5f-zkzjsmui", "forge-run-12-zkzjsmui", "forge-weights-12-zkzjsmui"):
        (base / name).mkdir()
        assert base / name not in sweep_folders()
        assert (base / name).is_dir()


def test_directory_tree_of_any_depth_is_removed_without_following_links(tmp_path: Path):
    tree = tmp_path / "tree"
    (tmp_path / "kept").touch()
    (tree / "a" / "locked").mkdir(parents=True)
    (tree / "a" / "link").symlink_to(tmp_path)
    (tree / "a" / "locked").chmod(0)
    descriptor = os.open(tree / "a", os.O_RDONLY)
    for _ in range(2000):
        os.mkdir("d", dir_fd=descriptor)
        inner = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    remove_tree(tree)
    remove_tree(tree)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_closing_scratch_removes_scratch_directory(base: Path):
    scratch = Scratch("forge-trackers-", base)
    assert scratch.path.name.startswith(f"forge-trackers-{os.getpid()}-{MACHINE}-")
    scratch.close()
    assert not list(base.iterdir())


def test_forge_clean_prints_removed_directories(base: Path):
    dead, left = begin(base, "killed")
    dead.wait()
    words = [sys.executable, "-c", "from forge.cli import main; main(['clean'])"]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"TMPDIR": str(base)}, check=True)
    assert f"removed {left}\n" in done.stdout


def test_sweep_removes_special_files_without_following_links(base: Path):
    kept = base / "kept"
    (kept / "folder").mkdir(parents=True)
    (kept / "file").write_text("precious")
    left = base / f"forge-run-1-{MACHINE}-x"
    (left / "a/b").mkdir(parents=True)
    (left / "a/link").symlink_to(kept)
    (left / "a/b/link").symlink_to(kept / "file")
    (left / "a/b/nowhere").symlink_to("/nowhere")
    os.mkfifo(left / "a/fifo")
    os.link(kept / "file", left / "a/hard")
    for name in ("\n", "\x1b[2J", " ", "...", "é" * 100, os.fsdecode(b"\xff"), "-rf", "*"):
        (left / "a" / name).mkdir()
        (left / "a" / name / name).touch()
    (left / "a").chmod(0o000)
    assert left in sweep_folders()
    assert not left.exists()
    assert (kept / "file").read_text() == "precious"
    assert (kept / "folder").is_dir()


def mounted(kept: Path, place: Path, command: list[str], base: Path) -> subprocess.CompletedProcess:
    """A command where `kept` is mounted at a place, for this command only."""
    script = 'mount --bind "$1" "$2" || exit 77; shift 2; exec "$@"'
    words = ["unshare", "--mount", "--propagation=private", "sh", "-c", script, "sh", str(kept), str(place), *command]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"TMPDIR": str(base)}, check=False)
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip(f"nothing can be mounted here: {done.stderr}")
    return done


@pytest.mark.parametrize("where", ["a/b", ".", "a b\nc"])
def test_sweep_keeps_mounts_in_abandoned_directory(base: Path, where: str):
    kept, left = base / "kept", base / f"forge-run-1-{MACHINE}-x"
    kept.mkdir()
    (left / where).mkdir(parents=True, exist_ok=True)
    (kept / "file").touch()
    place = left if where == "." else left / where
    done = mounted(kept, place, [sys.executable, "-c", "from forge.cli import main; main(['clean'])"], base)
    assert done.returncode == 0
    assert (kept / "file").exists()
    assert left.is_dir()
    assert f"removed {left}" not in done.stdout
    assert "has a mount in it: unmount it" in done.stderr
    assert left in sweep_folders()
    assert not left.exists()
