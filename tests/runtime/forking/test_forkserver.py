"""A forked process is what a started one would be, and launcher, process and server end with one another."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forge.runtime.controller.starting import Standbys

from forge.runtime.controller import ForgeActor, endpoint, forked_processes, run
from forge.runtime.controller.errors import ReplicaDied
from forge.runtime.controller.home import private_folder
from forge.runtime.forking.forkserver import ForkServer

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


def launch(folder: Path, server: ForkServer | None, **settings) -> tuple[subprocess.Popen, dict, dict]:
    """A launcher whose process stands by, what the process finds, and what is its own."""
    standbys = Standbys("one", 1, folder, {})
    asyncio.run(standbys.start(server, 600))
    return follow([*standbys.command[:-1], "program"], standbys, **settings)


def follow(arguments: list[str], *kept: object, **settings) -> tuple[subprocess.Popen, dict, dict]:
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **settings,
    )
    process.kept = kept  # type: ignore[attr-defined]
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


@pytest.mark.parametrize("forked", [True, False])
def test_a_process_that_stood_by_finds_what_a_started_one_finds(tmp_path: Path, server: ForkServer, forked: bool):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    settings = {
        "env": {**os.environ, "FORGE_X": "\udcff=a\nb"},
        "preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard)),
    }
    process, found, seen = launch(tmp_path, server if forked else None, **settings)
    assert seen["libraries"] == forked
    assert seen["pid"] != process.pid
    assert process.communicate("sys.exit(7)\n") == ("", "an error\n")
    assert process.returncode == 7
    started, expected, seen = follow(["-m", "program"], **settings)
    assert not seen["libraries"]
    # Under nohup SIGHUP is ignored everywhere.
    assert set(found.pop("ignored")) == {*expected.pop("ignored"), "SIGINT", "SIGHUP"}
    assert found == expected
    started.communicate("pass\n")


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"])
def test_another_environment_is_not_forked(
    tmp_path: Path, server: ForkServer, monkeypatch: pytest.MonkeyPatch, variable: str
):
    monkeypatch.setenv(variable, "1234")
    process, found, seen = launch(tmp_path, server)
    assert found["environment"][variable] == "1234"
    assert not seen["libraries"]
    process.communicate("pass\n")


def test_a_fork_that_fails_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nreal, count = os.fork, iter(range(9))\n"
        "def fork():\n    if next(count):\n        raise BlockingIOError(11, 'no process is left')\n    return real()\n"
        "os.fork = fork\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    server = ForkServer(tmp_path, {})
    first, _, seen = launch(tmp_path, server)
    assert seen["libraries"]
    second, _, seen = launch(tmp_path, server)
    assert not seen["libraries"]
    assert first.communicate("print('here')\n")[0] == "here\n"
    second.communicate("pass\n")
    server.end()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_the_launcher_ends_with_its_process(tmp_path: Path, server: ForkServer, number: signal.Signals):
    process, _, seen = launch(tmp_path, server)
    os.kill(seen["pid"], number)
    assert process.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("forked", [True, False])
def test_a_process_ends_with_its_launcher(tmp_path: Path, server: ForkServer, forked: bool):
    process, _, seen = launch(tmp_path, server if forked else None)
    other, *_ = launch(tmp_path, server)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    assert ends(seen["pid"])
    assert other.communicate("print('here')\n")[0] == "here\n"


def test_a_signal_reaches_the_process(tmp_path: Path, server: ForkServer):
    process, *_ = launch(tmp_path, server)
    assert process.stdin is not None
    assert process.stdout is not None
    act = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5)); print('ready', flush=True); signal.pause()"
    process.stdin.write(f"{act}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 5


@pytest.mark.full
def test_what_a_server_forked_outlives_it_and_another_server_forks(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    server = ForkServer(tmp_path, {})
    process, *_ = launch(tmp_path, server)
    lost = server.pid
    os.kill(lost, signal.SIGKILL)
    second, _, seen = launch(tmp_path, server)
    assert seen["libraries"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"the fork server (process {lost}) ended with SIGKILL: another one is started"
    server.end()
    for survivor in (process, second):
        assert survivor.communicate("print('here')\n")[0] == "here\n"
        assert survivor.returncode == 0


RUN = """
import asyncio, os, signal
from pathlib import Path
from forge.runtime.controller import forked_processes, run
from tests.runtime.controller.components import Counter

def servers():
    me = os.getpid()
    return [int(pid) for pid in Path(f"/proc/self/task/{me}/children").read_text().split()
            if Path(f"/proc/{pid}/comm").read_text() == "forge-fork\\n"]

async def main():
    service = await Counter.options(num_replicas=2).as_service()
    before = sorted(await service.where.fanout())
    (lost,) = servers()
    os.kill(lost, signal.SIGKILL)
    while not servers() or lost in servers():
        await asyncio.sleep(0.05)
    assert sorted(await service.where.fanout()) == before
    os.kill(before[0][1], signal.SIGKILL)
    while sorted(await service.where.fanout()) == before:
        await asyncio.sleep(0.05)
    print(lost, flush=True)

with forked_processes():
    run(main())
"""


@pytest.mark.slow
def test_a_run_whose_server_is_killed_loses_nothing_and_has_another_at_once():
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    notice, *rest = done.stderr.splitlines()
    assert notice.endswith(
        f"the fork server (process {done.stdout.strip()}) ended with SIGKILL: another one is started"
    )
    assert [line for line in rest if "is dead" not in line and "serves again" not in line] == []


@pytest.mark.slow
def test_a_server_that_does_not_live_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "transformers.py").write_text("import os\nos._exit(9)\n")
    server = ForkServer(tmp_path, {"PYTHONPATH": str(tmp_path)})
    for _ in range(3):
        process, _, seen = launch(tmp_path, server)
        assert not seen["libraries"]
        process.communicate("pass\n")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert lines[-1].endswith("ended with exit status 9: processes are started without it from now on")
    server.end()


@pytest.mark.parametrize("moment", ["up", "starting"])
def test_processes_that_stand_by_end_with_the_controller(tmp_path: Path, moment: str):
    (tmp_path / "sitecustomize.py").write_text("import os, time\ntime.sleep(float(os.environ.get('PAUSE', 0)))\n")
    code = (
        "import asyncio, os, sys; from pathlib import Path; from forge.runtime.controller.starting import Standbys\n"
        "async def main():\n"
        "    os.environ['PAUSE'] = sys.argv[2]\n"
        "    standbys = Standbys('one', 2, Path(sys.argv[1]), {})\n"
        "    task = asyncio.create_task(standbys.start(None, 600))\n"
        "    await asyncio.wait([task], timeout=5 if float(sys.argv[2]) else None)\n"
        "    print(*(process.pid for process in standbys._processes), flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path), "0" if moment == "up" else "8"]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    controller = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    pids = [int(word) for word in controller.stdout.split()]
    assert len(pids) == 2
    assert all(ends(pid) for pid in pids)


def test_a_process_that_does_not_come_up_says_so_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\nos._exit(3) if os.environ['END'] == 'exit' else time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    for ending, message in (("exit", r"one: process \d+ ended before it was up"), ("sleep", "used no CPU for 2 s")):
        monkeypatch.setenv("END", ending)
        standbys = Standbys("one", 1, tmp_path, {})
        with pytest.raises(ReplicaDied, match=message):
            asyncio.run(standbys.start(None, 2))
        (process,) = standbys._processes
        assert ends(process.pid)


def test_the_server_ends_with_its_parent(tmp_path: Path):
    code = (
        "import os, signal, sys; from pathlib import Path; from forge.runtime.forking.forkserver import ForkServer;"
        "server = ForkServer(Path(sys.argv[1]), {}); print(server.pid, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    parent = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert ends(int(parent.stdout))


def test_a_context_within_another_has_its_server_if_the_environment_is_the_same(monkeypatch: pytest.MonkeyPatch):
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


@pytest.mark.parametrize(("variable", "is_forked"), [("FORGE_X", True), ("A_LIBRARY_READS", False)])
def test_a_component_is_forked_unless_a_library_may_read_its_variables(variable: str, is_forked: bool):
    async def main() -> tuple[bool, str | None]:
        component = await Libraries.options(env={variable: "1"}).as_actor()
        return await component.state.call_one(variable)

    with forked_processes():
        assert run(main()) == (is_forked, "1")


def test_the_folder_of_a_compiler_keeps_the_server(monkeypatch: pytest.MonkeyPatch, server: ForkServer):
    # As PyTorch sets it in a controller that compiles something.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/nowhere")
    assert server.has_environment(os.environ)
