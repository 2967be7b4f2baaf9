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

from forge.runtime.controller import ForgeActor, endpoint, forked_processes, run
from forge.runtime.controller.home import private_folder
from forge.runtime.forking.forkserver import ForkServer

pytestmark = pytest.mark.processes

# Prints what it finds, then does what its standard input says.
PROGRAM = """
import json, os, resource, signal, sys, threading, time

ignored = [number for number in signal.Signals if signal.getsignal(number) == signal.SIG_IGN]
found = {
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "path": sys.path,
    "arguments": sys.argv[1:],
    "ignored": [number.name for number in ignored],
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "threads": threading.active_count(),
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
    """A module that is found in the process's own folder only."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)


def launch(server: ForkServer, **settings) -> tuple[subprocess.Popen, dict, dict]:
    """A launcher whose process is forked, what the process finds, and what is its own."""
    server.wait()
    return follow(server.launcher("program"), **settings)


def follow(arguments: list[str], **settings) -> tuple[subprocess.Popen, dict, dict]:
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **settings,
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


def test_forked_process_matches_a_newly_started_process(server: ForkServer):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    settings = {
        "env": {**os.environ, "FORGE_X": "\udcff=a\nb"},
        "preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard)),
    }
    process, found, seen = launch(server, **settings)
    assert seen["libraries"]
    assert seen["pid"] != process.pid
    assert process.communicate("sys.exit(7)\n") == ("", "an error\n")
    assert process.returncode == 7
    started, expected, seen = follow(["-m", "program"], **settings)
    assert not seen["libraries"]
    # Under nohup SIGHUP is ignored everywhere.
    assert set(found.pop("ignored")) == {*expected.pop("ignored"), "SIGINT", "SIGHUP"}
    for environment in (found["environment"], expected["environment"]):
        environment.pop("LC_CTYPE", None)  # Python's own
    assert found == expected
    started.communicate("pass\n")


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"])
def test_process_with_changed_library_variables_is_not_forked(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch, variable: str
):
    monkeypatch.setenv(variable, "1234")
    process, found, seen = launch(server)
    assert found["environment"][variable] == "1234"
    assert not seen["libraries"]
    process.communicate("pass\n")


@pytest.mark.full
def test_processes_start_without_fork_server_after_kill(tmp_path: Path):
    server = ForkServer(tmp_path, {})
    process, _, seen = launch(server)
    assert seen["libraries"]
    process.communicate("pass\n")
    os.kill(server.pid, signal.SIGKILL)
    assert ends(server.pid)
    assert not server.wait()
    process, _, seen = launch(server)
    assert not seen["libraries"]
    process.communicate("pass\n")
    server.end()


def test_signal_to_forked_process_is_delivered(server: ForkServer):
    process, *_ = launch(server)
    assert process.stdin is not None
    assert process.stdout is not None
    # Not signal.pause(): a signal that arrives just before it would never end it.
    act = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5)); print('ready', flush=True)"
    act += "; any(time.sleep(0.05) for _ in iter(int, 1))"
    process.stdin.write(f"{act}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 5


def test_fork_server_ends_with_parent_process(tmp_path: Path):
    code = (
        "import os, signal, sys; from pathlib import Path; from forge.runtime.forking.forkserver import ForkServer;"
        "server = ForkServer(Path(sys.argv[1]), {}); print(server.pid, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    parent = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert ends(int(parent.stdout))


def test_nested_fork_server_context_shares_server_of_same_environment(monkeypatch: pytest.MonkeyPatch):
    def sockets() -> set[Path]:
        return set(private_folder().glob("fork*"))

    # A server of the whole session may be up. Its environment differs from this one, so it is not the outer one.
    monkeypatch.setenv("AN_ENVIRONMENT_OF", "this test")
    before = sockets()
    with forked_processes():
        outer = sockets()
        assert len(outer - before) == 1
        with forked_processes():
            assert sockets() == outer
        assert sockets() == outer
        monkeypatch.setenv("A_LIBRARY_READS", "1")
        with forked_processes():
            assert len(sockets() - outer) == 1
        assert sockets() == outer
    assert sockets() == before


class Libraries(ForgeActor):
    """Says whether its process has imported what it has not asked for, and one variable."""

    @endpoint
    def state(self, variable: str) -> tuple[bool, str | None]:
        return "transformers.modeling_utils" in sys.modules, os.environ.get(variable)


@pytest.mark.full
@pytest.mark.parametrize(("variable", "is_forked"), [("FORGE_X", True), ("A_LIBRARY_READS", False)])
def test_component_with_library_variables_is_not_forked(variable: str, is_forked: bool):
    async def main() -> tuple[bool, str | None]:
        component = await Libraries.options(env={variable: "1"}).as_actor()
        return await component.state.call_one(variable)

    with forked_processes():
        assert run(main()) == (is_forked, "1")
