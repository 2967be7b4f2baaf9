"""A process that has imported PyTorch and transformers, and forks the processes of a run.

Importing them takes 3 to 5 CPU-seconds in each process; a fork of a process that has imported them has them at once.
Monarch starts a process by running a program, which it then watches. Here that program is a launcher of a few
milliseconds (`forklauncher.py`): it passes its environment, limits, folder and standard streams to the server, and
lives and ends as the process that the server forks.

The fork is safe because the server has one thread and opens no accelerator. The launcher starts the program itself
where there is no server, where the server has more than one thread, and where a variable of the environment differs
that a library may have read when the server imported it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

PROGRAM = "forge.controller.child"
LAUNCHER = Path(__file__).with_name("forklauncher.py")
# What trainers and generators import, apart from Monarch, which starts threads, and what imports it.
LIBRARIES = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.attention.flex_attention",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "safetensors.torch",
    "forge.training.trainer",
    "forge.engines.engine",
    "forge.data.load",
    "forge.store",
)
# Variables that differ from process to process, and that no library reads when it is imported.
FREE = ("HYPERACTOR_", "MONARCH_", "FORGE_", "PYTEST_", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES")
PATIENCE = 10.0  # seconds for a launcher's request
PR_SET_PDEATHSIG = 1


class ForkServer:
    """The fork server of this process. It ends with this process, and what it forked with it.

    Args:
        folder: a private folder, for its socket.
        settings: further variables of its environment.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self.address = folder / "fork"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self.address))
            listener.listen(1024)  # launchers wait until the server has imported
            self._process = subprocess.Popen(
                [sys.executable, "-m", "forge.forkserver", str(listener.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                env={**os.environ, **settings},
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended: processes are started without it
            self._process.stdin.write(json.dumps(bound(os.environ)).encode() + b"\n")
            self._process.stdin.flush()
        atexit.register(self.end)

    @property
    def command(self) -> list[str]:
        """Arguments that make Python the launcher of a process."""
        return ["-I", "-S", str(LAUNCHER), str(self.address), PROGRAM]

    def end(self) -> None:
        """End the server and the processes that it forked."""
        atexit.unregister(self.end)
        self._process.kill()  # the kernel kills its forks with it
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self.address.unlink(missing_ok=True)


class Request(NamedTuple):
    """What a process is to be: its program, resource limits, environment, and handles of standard input, output, error
    and its folder."""

    program: str
    limits: list[tuple[int, int, int]]
    environment: dict[bytes, bytes]
    handles: list[int]


def bound(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that must be the same where the server was started and in a process that it forks."""
    return {name: value for name, value in environment.items() if not name.startswith(FREE) and name != "_"}


def main(listener: socket.socket) -> None:
    """Serve until standard input ends; in a fork, be the program that the launcher asked for."""
    # What terminals and schedulers send to every process is for the controller to handle: at SIGTERM it saves the run,
    # for which it needs the forks, and these end with their server. A fork has the handlers of before: nohup ignores
    # SIGHUP.
    everyone = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in everyone}
    with suppress(OSError):
        Path("/proc/self/comm").write_text("forge-fork")  # what top and ps show; forks take names of their own
    expected = json.loads(sys.stdin.buffer.readline())
    gc.disable()  # there is hardly any garbage, and looking for it takes a sixth of the time
    for name in LIBRARIES:
        with suppress(ImportError):  # the process that needs it says so
            importlib.import_module(name)
    gc.freeze()  # a collection in a fork does not write to the memory that it shares with the server
    gc.enable()
    if (program := serve(listener, expected)) is not None:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def serve(listener: socket.socket, expected: dict[str, str]) -> str | None:
    """Fork for every launcher that connects, until standard input ends.

    Returns:
        in a fork the program to run, in the server None.
    """
    awake, wake = socket.socketpair()
    awake.setblocking(False)
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    launchers: dict[int, socket.socket] = {}  # by the process that was forked
    waiting = selectors.DefaultSelector()
    waiting.register(sys.stdin, selectors.EVENT_READ)
    waiting.register(listener, selectors.EVENT_READ)
    waiting.register(awake, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            source: Any = key.fileobj
            if source is sys.stdin:
                signal.set_wakeup_fd(-1)  # the ends of the forks are of no interest, and the socket goes first
                for pid in launchers:
                    os.kill(pid, signal.SIGKILL)
                return None
            if source is listener:
                launcher, _ = listener.accept()
                server, request, pid = os.getpid(), _read(launcher, expected), -1
                if request is not None:
                    with suppress(OSError):  # no memory or no process is left; the other forks live on
                        pid = os.fork()
                    if pid == 0:
                        for used in (waiting, listener, awake, wake, launcher, *launchers.values()):
                            used.close()
                        return _become(request, server)
                    for handle in request.handles:
                        os.close(handle)
                if pid < 0:
                    launcher.close()  # it starts the program itself
                    continue
                launchers[pid] = launcher
                waiting.register(launcher, selectors.EVENT_READ, pid)
                _send(launcher, b"y")
            elif source is awake:
                awake.recv(4096)
                for pid in list(launchers):
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        launcher = launchers.pop(pid)
                        _send(launcher, status.to_bytes(4, "little"))
                        with suppress(KeyError):
                            waiting.unregister(launcher)
                        launcher.close()
            elif key.data in launchers:
                if number := _receive(source):
                    os.kill(key.data, number[0])
                else:  # the launcher was killed
                    os.kill(key.data, signal.SIGKILL)
                    waiting.unregister(source)


def _read(launcher: socket.socket, expected: dict[str, str]) -> Request | None:
    """A launcher's request, None if it cannot be answered by a fork."""
    launcher.settimeout(PATIENCE)
    handles: list[int] = []
    try:
        length, handles, _, _ = socket.recv_fds(launcher, 4, 4)
        words = _receive(launcher, int.from_bytes(length, "little")).split(b"\0")
        program, limits, *variables = words
        environment = dict(variable.split(b"=", 1) for variable in variables)
        request = Request(
            program.decode(),
            [tuple(map(int, limit.split(b":"))) for limit in limits.split(b",")],  # type: ignore[misc]
            environment,
            handles,
        )
        same = bound({os.fsdecode(k): os.fsdecode(v) for k, v in environment.items()}) == expected
        if len(handles) == 4 and same and len(os.listdir("/proc/self/task")) == 1:
            return request
    except (OSError, ValueError):  # the launcher ended
        pass
    for handle in handles:
        os.close(handle)
    return None


def _become(request: Request, server: int) -> str:
    """Make a fork what a process would be that was started by the launcher."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # it ended before the line above
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *streams, folder = request.handles
    for number, handle in enumerate(streams):
        os.dup2(handle, number)
        os.close(handle)
    os.fchdir(folder)
    os.close(folder)
    for limit, soft, hard in request.limits:
        resource.setrlimit(limit, (soft, hard))
    os.environ.clear()
    os.environb.update(request.environment)
    tempfile.tempdir = None
    if not sys.flags.safe_path:
        with suppress(FileNotFoundError):  # the folder was removed
            sys.path[0] = os.getcwd()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    sys.argv = [request.program]
    return request.program


def _receive(launcher: socket.socket, length: int = 1) -> bytes:
    """So many bytes; fewer where the launcher ended."""
    received = b""
    with suppress(OSError):
        while len(received) < length and (more := launcher.recv(length - len(received))):
            received += more
    return received


def _send(launcher: socket.socket, answer: bytes) -> None:
    with suppress(OSError):  # the launcher was killed
        launcher.sendall(answer)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
