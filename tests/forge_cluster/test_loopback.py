"""Workers on this machine, at loopback addresses: what needs no other machine, and no root."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forge_cluster.machines import ROOT, Controller, environment, wait_until

pytestmark = pytest.mark.processes


class Here:
    """This machine, as a `Controller` starts its program."""

    def start(self, words: list[str], cwd: str, **settings) -> subprocess.Popen:
        return subprocess.Popen(words, cwd=cwd, **settings)


@pytest.fixture
def workers(tmp_path) -> Iterator[list[subprocess.Popen]]:
    started = [work(tmp_path / "hosts" / name, tmp_path) for name in ("a", "b")]
    wait_until(lambda: len(list((tmp_path / "hosts").glob("*/*"))) == 2, 60, "both register")
    for folder in (tmp_path / "hosts").iterdir():  # two hosts of one name: as files of one folder
        (file,) = folder.iterdir()
        file.rename(tmp_path / f"host-{folder.name}")
    (tmp_path / "list").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"host-{name}").rename(tmp_path / "list" / name)
    yield started
    for process in started:
        process.kill()
        process.wait(20)


def work(folder: Path, root: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "forge", "worker", "--listen", "127.0.0.1:0", "--gpus", "", "--grace", "60"]
    return subprocess.Popen([*command, "--register", str(folder)], cwd=ROOT, env=environment())


@pytest.mark.slow
def test_replicas_are_placed_on_joining_and_moved_off_leaving_hosts(workers, tmp_path):
    controller = Controller(Here(), "replicas", "2", "2", hosts=str(tmp_path / "list"))
    controller.read("ready")
    assert daemons(controller) == {process.pid for process in workers}
    workers[0].kill()
    wait_until(lambda: daemons(controller) == {workers[1].pid}, 40, "its replica is replaced")
    (tmp_path / "list" / "a").unlink()
    third = work(tmp_path / "hosts" / "c", tmp_path)  # a host that comes later is found in the folder
    try:
        wait_until(lambda: any((tmp_path / "hosts" / "c").glob("*")), 60, "it registers")
        next((tmp_path / "hosts" / "c").iterdir()).rename(tmp_path / "list" / "c")
        wait_until(lambda: len(controller.ask("hosts")) == 2, 30, "it is taken up")
        controller.end()
    finally:
        third.terminate()
        third.wait(20)


def test_killed_controller_leaves_no_replica_processes(workers, tmp_path):
    controller = Controller(Here(), "replicas", "2", "2", hosts=str(tmp_path / "list"))
    controller.read("ready")
    pids = [pid for _, _, pid in controller.ask("where")]
    os.kill(controller.process.pid, signal.SIGKILL)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10, "its processes end")


@pytest.mark.full
def test_cluster_doctor_reports_each_host(workers, tmp_path):
    command = [sys.executable, "-m", "forge", "doctor", "cluster", "--hosts", str(tmp_path / "list")]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.stdout.count("free") >= 2
    assert "does not see" not in done.stdout
    nowhere = subprocess.run(
        [*command[:-1], "127.0.0.1:1"], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert nowhere.returncode == 1
    assert "problem: no worker listens at 127.0.0.1:1: start one there with `forge worker`" in nowhere.stdout


def test_cluster_worker_without_secret_raises_one_line_error():
    own = environment()
    del own["FORGE_SECRET"]
    command = [sys.executable, "-m", "forge", "worker", "--listen", "127.0.0.1:0", "--gpus", ""]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "error: FORGE_SECRET is not set: create a secret" in done.stderr


@pytest.mark.full
def test_oversized_placement_raises_before_any_process_starts(workers, tmp_path):
    command = [sys.executable, "-m", "forge", "train", "tests/forge_cluster/tiny.yaml", "--run.root", str(tmp_path)]
    command += ["--services.trainer.hosts", "3", "--services.trainer.procs", "3"]
    own = environment(FORGE_HOSTS=str(tmp_path / "list"))
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "error: no host has room for services.trainer, replica 0: 3 processes on 3 hosts: " in done.stderr
    assert done.stderr.count("1 of these processes fit") + done.stderr.count("3 of these processes fit") == 2
    assert not (tmp_path / "tiny").exists()


def daemons(controller: Controller) -> set[int]:
    """The daemons of its replicas: a worker is between the two."""
    return {parent(parent(pid)) for _, _, pid in controller.ask("where")}


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except FileNotFoundError:  # it has just ended
        return 0
