"""Fork server: a process that has imported PyTorch and transformers, and forks the processes of a run.

Importing them takes 3 to 5 CPU-seconds in each process; a fork of a process that has imported them has them at once.
The kernel ends the forks with their server, and the server ends with the controller.

The fork is safe because the server has one thread and opens no accelerator. The server does not fork when it has more
than one thread, or when a variable of the environment differs that a library may have read during its import.
"""

import atexit
import fcntl
import gc
import importlib
import itertools
import json
import logging
import os
import resource
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from . import forklauncher
from .forklauncher import receive_bytes

# The imports of trainers and generators, except Monarch, which starts threads, and modules that import it.
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
    "forge.runtime.store",
)
# Prefixes of variables that differ from process to process, and that no library reads during its import. The folders of
# compilers belong to the server: PyTorch sets them in a controller that compiles something.
FREE = (
    *("HYPERACTOR_", "MONARCH_", "FORGE_", "PYTEST_", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MALLOC_", "LC_CTYPE"),
)
LIVES = 3  # servers that one controller starts, as each may end when memory is short
REQUEST_TIMEOUT = 10.0  # seconds; a launcher sends its request at once
# Signals that terminals and schedulers send to every process of a run: its controller handles them.
HELD = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)

log = logging.getLogger(__name__)
_numbers = itertools.count()


class ForkServer:
    """The fork server of this process. It ends with the process, and its forks with it.

    Args:
        folder: a private folder, for its socket.
        settings: additional variables of its environment.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self.address = folder / f"fork{next(_numbers)}"
        self._settings = settings
        self._process: subprocess.Popen[bytes]
        self._is_up: bool
        self._lives = LIVES
        self._waiting = threading.Lock()  # of threads
        self._start_server()
        atexit.register(self.end)

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._process.pid

    def has_environment(self, environment: Mapping[str, str]) -> bool:
        """Return whether it forks processes with these variables, where they differ only in those that no library
        reads."""
        return bound_variables(environment) == self._bound

    def launcher(self, program: str) -> list[str]:
        """Return the arguments that make Python the launcher of a fork that runs a program."""
        return ["-I", "-S", str(Path(forklauncher.__file__)), str(self.address), program]

    def wait(self) -> bool:
        """Wait until the server has imported its libraries; start another one if it has ended. Return whether one is
        up."""
        with self._waiting:
            assert self._process.stdout is not None
            while not self._is_up or self._process.poll() is not None:
                if self._process.poll() is None and self._process.stdout.read(1):
                    self._is_up = True
                    continue
                if self._lives <= 1:
                    return False
                self._lives -= 1
                status = self._process.wait()
                log.warning("the fork server (process %d) ended with %d: another one is started", self.pid, status)
                self._close_server()
                self._start_server()
            return True

    def end(self) -> None:
        """End the server."""
        atexit.unregister(self.end)
        self._lives = 0
        self._process.kill()
        self._process.wait()
        self._close_server()

    def _start_server(self) -> None:
        self._is_up = False
        self._bound = bound_variables(os.environ)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self.address))
            listener.listen(1024)  # requests wait until the server has imported
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env={**os.environ, **self._settings},
            )

        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended: processes are started without it
            self._process.stdin.write(json.dumps(self._bound).encode() + b"\n")
            self._process.stdin.flush()

    def _close_server(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self.address.unlink(missing_ok=True)


def bound_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that must be equal in the server and in a process that it forks."""
    return {name: value for name, value in environment.items() if not name.startswith(FREE) and name != "_"}


class ForkRequest(NamedTuple):
    """A fork request: program, resource limits, environment, and the handles of standard input, output, error and the
    working directory."""

    program: str
    limits: list[tuple[int, ...]]
    environment: dict[bytes, bytes]
    handles: list[int]


def main(listener: socket.socket) -> None:
    """Serve until standard input ends; in a fork, run the program that was asked for."""
    for number in HELD:
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        Path("/proc/self/comm").write_text("forge-fork")  # for top and ps; forks rename themselves
    expected = json.loads(sys.stdin.buffer.readline())
    gc.disable()  # there is hardly any garbage, and collecting takes a sixth of the time
    for name in LIBRARIES:
        with suppress(Exception):  # the process that needs it reports the error
            importlib.import_module(name)
    gc.freeze()  # collections in a fork do not write to memory shared with the server

    gc.enable()
    with suppress(BrokenPipeError):  # the controller ended
        os.write(1, b"y")
    fork = serve_forks(listener, expected)
    if fork is not None:
        run_program(*fork)


def serve_forks(listener: socket.socket, expected: dict[str, str]) -> tuple[socket.socket, ForkRequest] | None:
    """Fork for every connection until standard input ends; in a fork, return its connection and request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets forks that ended
    while True:
        ready, _, _ = select.select([sys.stdin, listener], [], [])
        if sys.stdin in ready:
            return None
        connection, _ = listener.accept()
        request = read_request(connection)

        if request is not None:
            # Only variables that libraries cannot have read may differ, and only a process of one thread forks safely.
            variables = {os.fsdecode(name): os.fsdecode(value) for name, value in request.environment.items()}
            pid = -1
            if bound_variables(variables) == expected and len(os.listdir("/proc/self/task")) == 1:
                with suppress(OSError):  # no memory or no process is left
                    pid = os.fork()
            if pid == 0:
                listener.close()
                return connection, request
            for handle in request.handles:
                os.close(handle)
            if pid < 0:
                with suppress(OSError):  # the launcher ended
                    connection.sendall(bytes(4))

        connection.close()


def read_request(launcher: socket.socket) -> ForkRequest | None:
    """Read a launcher's request; None if it ended."""
    launcher.settimeout(REQUEST_TIMEOUT)
    handles: list[int] = []
    try:
        length, handles, _, _ = socket.recv_fds(launcher, 4, 4)
        program, limits, *variables = receive_bytes(launcher, int.from_bytes(length, "little")).split(b"\0")
        environment = dict(variable.split(b"=", 1) for variable in variables)
        quantities = [tuple(map(int, limit.split(b":"))) for limit in limits.split(b",")]
        return ForkRequest(program.decode(), quantities, environment, handles)
    except (OSError, ValueError):  # without a process its handles would stay open
        for handle in handles:
            os.close(handle)
        return None


def run_program(launcher: socket.socket, request: ForkRequest) -> None:
    """Run a program instead of its launcher: with its environment, limits, folder and streams."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # A signal that is ignored stays so in programs that a component starts, and SIGTERM is how it ends them.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
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
    tempfile.tempdir = None  # TMPDIR may differ
    if not sys.flags.safe_path:
        with suppress(FileNotFoundError):  # the folder was removed
            sys.path[0] = os.getcwd()

    # Forks of one server would otherwise draw the same numbers.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()

    # The kernel kills this process when the launcher ends, which never sends again.
    launcher.settimeout(None)
    launcher.sendall(os.getpid().to_bytes(4, "little"))
    fcntl.fcntl(launcher, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(launcher, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(launcher, fcntl.F_SETFL, fcntl.fcntl(launcher, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([launcher], [], [], 0)[0]:  # it ended before
        os.kill(os.getpid(), signal.SIGKILL)

    sys.argv = [request.program]
    status = 1 << 8
    try:
        runpy.run_module(request.program, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ending:
        status = (ending.code if isinstance(ending.code, int) else int(ending.code is not None)) << 8
        raise
    finally:
        launcher.sendall(struct.pack("=i", status))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
