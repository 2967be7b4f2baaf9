"""Agents as commands: real programs, confined, against a real server."""

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from forge.config import ConfigError
from forge_agents.command import INNER_FOLDER, MAX_CONNECTIONS, AgentCommand, CommandResult, CommandRunner
from tests.forge_agents.programs import ASK, DENIED, FORBIDDEN, KERNEL, LOOK

pytestmark = pytest.mark.processes
ORDINARY = 12345
SOURCES = str(Path(__file__).parents[2] / "src")


class Gateway(BaseHTTPRequestHandler):
    """Answers with what it was sent, in small pieces."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = json.dumps({"path": self.path, "key": self.headers["Authorization"], "size": len(body)}).encode()
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for start in range(0, len(answer), 10):
            piece = answer[start : start + 10]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def play(*commands: AgentCommand | list[str], **arguments: Any) -> list[CommandResult]:
    """Run commands at once, with what they wrote; their folders are removed."""

    async def run() -> list[CommandResult]:
        async with CommandRunner() as runner:
            runs = (one if isinstance(one, AgentCommand) else AgentCommand(one, timeout=60) for one in commands)
            return await asyncio.gather(*(runner.run(one, **arguments) for one in runs))

    return asyncio.run(run())


def python(code: str, **settings: Any) -> AgentCommand:
    return AgentCommand(["python", "-c", code], **{"timeout": 60, **settings})


def processes_with(mark: str) -> list[int]:
    """The processes of this machine whose command line has a mark."""
    marked = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        if mark in words:
            marked.append(int(path.parent.name))
    return marked


def gone(mark: str) -> bool:
    """Whether no process with a mark is left, after a moment for the kernel."""
    deadline = time.monotonic() + 20
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not processes_with(mark)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_agent_program_gets_only_client_environment_variables(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_SECRET", "hidden")
    command = python(
        "import json, os, sys; print(json.dumps([dict(os.environ), os.getcwd(), sys.argv[1:]]))",
        env={"MINE": "{model} at {url} in {folder}", "OPENAI_MODEL": "other"},
    )
    command = AgentCommand([*command.command, "{task}", "{key}{nothing}"], env=command.env, timeout=60)
    (result,) = play(command, url=url, key="k1", model="policy", task_text="Say {key}")
    env, folder, arguments = json.loads(result.stdout)
    assert (folder, arguments) == (INNER_FOLDER, ["Say {key}", "k1{nothing}"])
    assert env["MINE"] == f"policy at {url} in {INNER_FOLDER}"
    assert env["FORGE_TASK"] == "Say {key}"
    assert env["OPENAI_BASE_URL"] == env["OPENAI_API_BASE"] == f"{url}/v1"
    assert env["ANTHROPIC_BASE_URL"] == url
    assert {env[f"{name}_API_KEY"] for name in ("OPENAI", "ANTHROPIC")} == {"k1"}
    assert (env["OPENAI_MODEL"], env["ANTHROPIC_MODEL"]) == ("other", "policy")
    assert env["HOME"] == f"{INNER_FOLDER}/.home"
    assert not {name for name in env if name.startswith("FORGE_")} - {"FORGE_TASK"}


def test_agent_result_has_exit_status_output_and_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "in.txt").write_text("from the folder")
    (tmp_path / "data" / "run.sh").write_text("#!/bin/sh\ncat data/in.txt more/text > out.txt\nexit 3\n")
    (tmp_path / "data" / "run.sh").chmod(0o755)

    async def run() -> None:
        async with CommandRunner() as runner:
            command = AgentCommand(["data/run.sh"], files=tmp_path, timeout=60)
            result = await runner.run(command, files={"more/text": " and a text"})
            assert (result.status, result.exit_code, result.stderr) == ("exited", 3, "")
            assert result.read("out.txt") == b"from the folder and a text"
            # A test runs in the same folder, and sees what the agent left.
            test = AgentCommand(["sh", "-c", "cat out.txt; cat test.txt"], timeout=60)
            after = await runner.run(test, files={"test.txt": "!"}, folder=result.folder)
            assert (after.stdout, after.folder) == ("from the folder and a text!", result.folder)
            crash = await runner.run(AgentCommand(["sh", "-c", "echo last words >&2; kill -SEGV $$"], timeout=60))
            assert (crash.status, crash.exit_code, crash.stderr) == ("exited", -signal.SIGSEGV, "last words\n")
            missing = await runner.run(AgentCommand(["no-such-agent"], timeout=60))
            assert missing.status == "missing"
            assert missing.reason.startswith("no-such-agent cannot be executed")
            for one in (result, crash, missing):
                one.remove()
                one.remove()
            assert not result.folder.exists()
            left = await runner.run(AgentCommand(["sh", "-c", "mkdir -p a/b; touch a/b/c; chmod 0 a/b a"], timeout=60))
        assert not left.folder.exists()

    asyncio.run(run())
    assert (tmp_path / "data" / "in.txt").read_text() == "from the folder"


DEEP = "import os\nfor _ in range({count}):\n    os.mkdir('{name}'); os.chdir('{name}')"
FLOOD = """
import socket, sys, time
from urllib.parse import urlsplit

address = urlsplit(sys.argv[1])
connections = []
for _ in range(300):
    try:
        connections.append(socket.create_connection((address.hostname, address.port), timeout=0.5))
    except OSError:
        break
time.sleep(1)
"""


@pytest.mark.full
@pytest.mark.parametrize(("count", "name"), [(1200, "d"), (300, "d" * 200), (5000, "d")])
async def test_deeply_nested_agent_directories_are_removed(count: int, name: str) -> None:
    async with CommandRunner() as runner:
        result = await runner.run(python(DEEP.format(count=count, name=name)))
        after = await runner.run(
            AgentCommand(["cat", "t"], timeout=60), folder=result.folder, files={"t": "text", f"{name}/u": ""}
        )
        assert (result.status, after.stdout) == ("exited", "text")
        result.remove()
        assert not result.folder.parent.exists()
        left = await runner.run(python(DEEP.format(count=count, name=name)))
    assert not left.folder.exists()


def test_agent_connections_do_not_exhaust_file_descriptors(url: str) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, len(os.listdir("/proc/self/fd")) - descriptors)
            await asyncio.sleep(0.01)

    async def run() -> None:
        async with CommandRunner() as runner:
            watching = asyncio.create_task(watch())
            flood = AgentCommand([*python(FLOOD).command, "{url}"], timeout=20)
            results = await asyncio.gather(*(runner.run(flood, url=url) for _ in range(2)))
            results.append(await runner.run(AgentCommand([*python(FLOOD).command, "{url}"], timeout=20), url=url))
            watching.cancel()
            assert [result.exit_code for result in results] == [0, 0, 0]

    asyncio.run(run())
    # Those of a connection are two; the server of this process has a third.
    assert MAX_CONNECTIONS < most < 3 * 2 * MAX_CONNECTIONS + 40


@pytest.mark.parametrize("task", ["x" * 131_000, "\u00e4" * 70_000, "a\0b", "a\ud800b"])
def test_task_unfit_for_environment_variable_is_passed_as_file(task: str) -> None:
    command = python(
        "import os; print(ascii(open(os.environ['FORGE_TASK_FILE']).read()[:99]), 'FORGE_TASK' in os.environ)"
    )
    (result,) = play(command, task_text=task)
    assert result.stdout.split() == [ascii(task[:99]).replace("\\ud", "\\\\ud"), "False"]
    with pytest.raises(ConfigError, match="FORGE_TASK_FILE"):
        play(AgentCommand(["echo", "{task}"]), task_text=task)


def test_agent_symlinks_do_not_reach_outside_agent_directory(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hidden")

    async def run() -> None:
        async with CommandRunner() as runner:
            links = f"ln -s {secret} out; ln -s {tmp_path} tests; mkfifo pipe; echo fine > text; ln -s text link"
            result = await runner.run(AgentCommand(["sh", "-c", links], timeout=60))
            for path in ("out", "tests/secret", "pipe", "nothing", f"../../../{secret.name}"):
                with pytest.raises(FileNotFoundError):
                    result.read(path)
            assert result.read("link") == b"fine\n"
            await runner.run(AgentCommand(["true"]), folder=result.folder, files={"tests/new": "x"})
            assert result.read("tests/new") == b"x"
            for path in ("/etc/x", "../x", ""):
                with pytest.raises(ValueError, match="within the task directory"):
                    await runner.run(AgentCommand(["true"]), files={path: "x"})
            await runner.run(AgentCommand(["true"]), folder=result.folder, files={"out": "the test's"})
            assert result.read("out") == b"the test's"

    asyncio.run(run())
    assert secret.read_text() == "hidden"
    assert not (tmp_path / "new").exists()


def test_agent_program_cannot_read_host_machine_or_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    secret.chmod(0o644)
    mark = uuid.uuid4().hex
    monkeypatch.setenv("FORGE_SECRET", mark)

    async def run() -> dict[str, Any]:
        async with CommandRunner() as runner:
            other = await runner.run(AgentCommand(["sh", "-c", "echo theirs > answer"], timeout=60))
            paths = [str(secret), str(other.folder / "answer"), "/etc/shadow", f"/proc/{os.getpid()}/environ"]
            result = await runner.run(python(LOOK.replace("PATHS", repr(paths)).replace("MARK", repr(mark[::-1]))))
            assert result.status == "exited", result
            assert result.stderr == ""
            return dict(json.loads(result.stdout))

    assert asyncio.run(run()) == {"file": [""] * 4, "environ": False, "processes": [1, 2], "writable": [], "runs": []}


def test_agent_program_reaches_only_the_gateway(url: str) -> None:
    name = uuid.uuid4().hex
    with socket.create_server(("127.0.0.1", 0)) as other, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{name}")
        abstract.listen()
        words = json.dumps([other.getsockname()[1], name])
        command = AgentCommand(["python", "-c", DENIED + ASK, words], timeout=60)
        (with_gateway,) = play(command, url=url, key="k1")
        (without,) = play(command)
        (on_host,) = play(AgentCommand(command.command, timeout=60, network="host"), url=url, key="k1")
    alone = {"loopback": False, "network": False, "abstract": False, "kinds": []}
    answers = [{"path": "/v1/chat", "key": "k1", "size": size} for size in (10, 3_000_000)]
    assert json.loads(with_gateway.stdout) == {"answers": answers, **alone}, with_gateway.stderr
    assert json.loads(without.stdout) == {"answers": [], **alone}, without.stderr
    view = json.loads(on_host.stdout)
    assert (view["answers"], view["loopback"], view["abstract"]) == (answers, True, True)


def test_agent_program_lacks_capabilities_and_escape_syscalls() -> None:
    (result,) = play(python(KERNEL))
    assert (result.stdout, result.stderr) == (f"{['0' * 16, '0' * 16, '1', '2']}\n", "")


@pytest.mark.parametrize(
    ("code", "settings", "status", "reason"),
    [
        ("import time; time.sleep(1000)", {"timeout": 0.5}, "timeout", "it ran for 0.5 s"),
        (
            "import signal, time; signal.pthread_sigmask(0, range(1, 65)); time.sleep(99)",
            {"timeout": 0.5},
            "timeout",
            "",
        ),
        ("x = [bytearray(10 << 20) for _ in range(10_000)]", {"memory_mb": 200}, "memory", "over 200 MB"),
        (
            "import os, time\nfor _ in range(6): os.fork() or (b'x' * (60 << 20), time.sleep(60))\ntime.sleep(60)",
            {"memory_mb": 200},
            "memory",
            "over 200 MB",
        ),
        ("while True: print('y' * 9999)", {"output_kb": 300}, "killed", "output_kb (300)"),
        ("import os\nwhile True: os.write(2, b'y' * 9999)", {"output_kb": 300}, "killed", "output_kb (300)"),
        (
            "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
            {"processes": 30, "timeout": 1.5},
            "timeout",
            "",
        ),
        ("import os; os.kill(os.getpid(), 9)", {}, "killed", "SIGKILL"),
    ],
    ids=["sleep", "no signals", "memory", "memory of several", "output", "errors", "forks", "kill"],
)
def test_exceeded_limit_ends_agent_program_and_child_processes(
    code: str, settings: dict[str, Any], status: str, reason: str
) -> None:
    mark = uuid.uuid4().hex
    (result,) = play(AgentCommand(["python", "-c", code, mark], **{"timeout": 60, **settings}))
    assert result.status == status, result
    assert reason in result.reason
    assert len(result.stdout) + len(result.stderr) <= 2 << 16
    assert gone(mark)


def test_cancelled_runner_call_ends_agent_program() -> None:
    mark = uuid.uuid4().hex

    async def run() -> None:
        async with CommandRunner() as runner:
            task = asyncio.create_task(runner.run(AgentCommand(["sh", "-c", "sleep 1000; :", mark])))
            while not processes_with(mark):
                await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert gone(mark)
            # A closed runner ends what runs.
            task = asyncio.create_task(runner.run(AgentCommand(["sh", "-c", "sleep 1000; :", mark])))
            while not processes_with(mark):
                await asyncio.sleep(0.02)
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(RuntimeError, match="start"):
            await runner.run(AgentCommand(["true"]))

    asyncio.run(run())
    assert gone(mark)


CONTROLLER = """
import asyncio, sys
from forge_agents.command import AgentCommand, CommandRunner
async def main():
    async with CommandRunner() as runner:
        await runner.run(AgentCommand(["sh", "-c", "(setsid sh -c 'sleep 1000; :' $0 &) ; sleep 1000; :", sys.argv[1]]))
asyncio.run(main())
"""


def keepers_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    return [int(child) for child in children if "zygote.main" in Path(f"/proc/{child}/cmdline").read_text()]


def test_agent_processes_end_when_controller_is_killed() -> None:
    mark = uuid.uuid4().hex
    controller = subprocess.Popen([sys.executable, "-c", CONTROLLER, mark], env={**os.environ, "PYTHONPATH": SOURCES})
    wait_for(lambda: len(processes_with(mark)) >= 3)
    (keeper,) = keepers_of(controller.pid)
    controller.kill()
    controller.wait()
    assert gone(mark)
    wait_for(lambda: not Path(f"/proc/{keeper}").exists())


def play_as_user(connection: Any, url: str, secret: str) -> None:
    """In a child: become an ordinary user, and run programs."""
    os.setgroups([])
    os.setgid(ORDINARY)
    os.setuid(ORDINARY)

    async def run() -> list[CommandResult]:
        async with CommandRunner(python="/usr/bin/python3") as runner:
            hostile = (
                f"cat {secret}; id -u; echo x > /usr/x; echo mine > out; cat out; (setsid sleep 1000 &); ps -A | wc -l"
            )
            commands = [
                AgentCommand(["sh", "-c", hostile], timeout=60),
                AgentCommand(["/usr/bin/python3", "-c", DENIED + ASK, json.dumps([1, "none"])], timeout=60),
                AgentCommand(["sh", "-c", "while :; do sh -c : & done"], processes=20, timeout=1),
            ]
            return [await runner.run(command, url=url, key="k1") for command in commands]

    connection.send(asyncio.run(run()))


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_agent_programs_of_unprivileged_user_are_confined(url: str, tmp_path: Path) -> None:
    if not os.access("/usr/bin/python3", os.X_OK):
        pytest.skip("no Python that another user can start")
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    secret.chmod(0o644)
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=play_as_user, args=(there, url, str(secret)))
    child.start()
    assert here.poll(60)
    hostile, asking, forking = here.recv()
    child.join()
    assert "hidden" not in hostile.stdout
    assert hostile.stdout.split()[:2] == ["65534", "mine"]
    assert hostile.status == "exited"
    assert json.loads(asking.stdout)["answers"][0] == {"path": "/v1/chat", "key": "k1", "size": 10}, asking
    assert forking.status in ("timeout", "exited")


@pytest.mark.full
def test_agent_programs_without_namespaces_are_rejected_by_default() -> None:
    mark = uuid.uuid4().hex
    limit = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    words = ["unshare", "--map-root-user", "sh", "-c", limit, "sh", sys.executable, "-c", FORBIDDEN, mark]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": SOURCES}, capture_output=True, text=True, timeout=120)
    if "unshare" in done.stderr and not done.stdout:
        pytest.skip("user namespaces are not permitted here")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("rejected: agents cannot be confined on this machine"), done
    assert lines[1:] == ["none exited 4 True", "timeout"], done
    assert gone(mark)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"command": "ls -l"}, "list of a program"),
        ({"command": []}, "list of a program"),
        ({"timeout": 0}, "timeout must be a positive number"),
        ({"processes": True}, "processes must be a positive number"),
        ({"network": "all"}, "gateway or host"),
        ({"files": "/no/such/folder"}, "files must be a directory"),
        ({"readable": ["/no/such/file"]}, "does not exist"),
        ({"readable": ["/"]}, "root directory"),
    ],
)
def test_invalid_agent_command_settings_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AgentCommand(**{"command": ["true"], **settings})
