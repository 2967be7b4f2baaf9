"""A forked process is what a started one would be, and launcher, process and server end with one another."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge.forkserver import LAUNCHER, ForkServer

pytestmark = pytest.mark.processes

# Prints what it finds, then does what its standard input says.
PROGRAM = """
import json, os, resource, signal, sys, threading

ignored = [number for number in signal.Signals if signal.getsignal(number) == signal.SIG_IGN]
found = {
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "path": sys.path,
    "arguments": sys.argv[1:],
    "ignored": [number.name for number in ignored],
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "threads": threading.active_count(),
    "open": sorted(int(handle) for handle in os.listdir("/proc/self/fd"))[:-1],
}
seen = {"pid": os.getpid(), "libraries": "transformers.modeling_utils" in sys.modules}
print(json.dumps([found, seen]), flush=True)
print("an error", file=sys.stderr, flush=True)
exec(sys.stdin.readline())
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    server = ForkServer(tmp_path_factory.mktemp("server"), {"GOMP_SPINCOUNT": "2000"})
    yield server
    server.end()


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is found in the process's own folder alone."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)


def launch(address: Path, **settings) -> tuple[subprocess.Popen, dict, dict]:
    words = [sys.executable, "-I", "-S", str(LAUNCHER), str(address), "program"]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings
    )
    assert process.stdout is not None
    found, seen = json.loads(process.stdout.readline())
    return process, found, seen


def ends(pid: int) -> bool:
    """Whether the process ends within a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def test_a_fork_finds_what_a_started_process_finds(server: ForkServer):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    settings = {
        "env": {**os.environ, "FORGE_X": "\udcff=a\nb"},
        "preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard)),
    }
    forked, found, seen = launch(server.address, **settings)
    assert seen["libraries"]
    assert seen["pid"] != forked.pid
    assert forked.communicate("sys.exit(7)\n") == ("", "an error\n")
    assert forked.returncode == 7
    started, expected, seen = launch(Path("nowhere"), **settings)
    assert not seen["libraries"]
    assert found == expected
    started.communicate("pass\n")


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"])
def test_another_environment_is_not_forked(server: ForkServer, variable: str):
    process, found, seen = launch(server.address, env={**os.environ, variable: "1234"})
    assert found["environment"][variable] == "1234"
    assert not seen["libraries"]
    assert seen["pid"] == process.pid
    process.communicate("pass\n")


def test_a_fork_that_fails_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nreal, count = os.fork, iter(range(9))\n"
        "def fork():\n    if next(count):\n        raise BlockingIOError(11, 'no process is left')\n    return real()\n"
        "os.fork = fork\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    server = ForkServer(tmp_path, {})
    first, _, seen = launch(server.address)
    assert seen["pid"] != first.pid
    second, _, seen = launch(server.address)
    assert seen["pid"] == second.pid
    assert first.communicate("print('here')\n")[0] == "here\n"
    second.communicate("pass\n")
    server.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGABRT])
def test_the_launcher_ends_as_its_process_does(server: ForkServer, number: signal.Signals):
    process, _, seen = launch(server.address)
    os.kill(seen["pid"], number)
    assert process.wait(60) == -number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_process_ends_with_its_launcher(server: ForkServer, number: signal.Signals):
    process, _, seen = launch(server.address)
    other, *_ = launch(server.address)
    process.send_signal(number)
    assert process.wait(60) == -number
    assert ends(seen["pid"])
    assert other.communicate("print('here')\n")[0] == "here\n"


def test_a_signal_reaches_the_process(server: ForkServer):
    process, *_ = launch(server.address)
    assert process.stdin is not None
    assert process.stdout is not None
    act = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5)); print('ready', flush=True); signal.pause()"
    process.stdin.write(f"{act}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 5


@pytest.mark.parametrize("how", ["end", "kill"])
def test_forks_end_with_the_server_and_later_processes_are_started(tmp_path: Path, how: str):
    server = ForkServer(tmp_path, {})
    process, _, seen = launch(server.address)
    assert seen["libraries"]
    server.end() if how == "end" else server._process.kill()
    assert process.wait(60) == -signal.SIGKILL
    assert ends(seen["pid"])
    server.end()
    process, _, seen = launch(server.address)
    assert seen["pid"] == process.pid
    process.communicate("pass\n")


def test_the_server_ends_with_its_parent(tmp_path: Path):
    code = (
        "import os, signal, sys; from pathlib import Path; from forge.forkserver import ForkServer;"
        "server = ForkServer(Path(sys.argv[1]), {}); print(server._process.pid, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    parent = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert ends(int(parent.stdout))
