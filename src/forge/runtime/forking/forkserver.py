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
# Prefixes of environment variables that may differ between the server and a fork, as no library reads them during its
# import. The folders of compilers are among them, as PyTorch sets them in a controller that compiles something.
FREE = (
    *("HYPERACTOR_", "MONARCH_", "FORGE_", "PYTEST_", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MALLOC_", "LC_CTYPE"),
)
REQUEST_TIMEOUT = 10.0  # seconds; a launcher sends its request at once
# Ignored signals: terminals and schedulers send them to every process of a run, and only the controller handles them.
HELD = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)

_numbers = itertools.count()


class ForkServer:
    """The controller's side of a fork server: starts the server process.

    The server ends with this process, and its forks end with the server.

    Args:
        folder: a private folder, for the server's socket.
        settings: environment variables of the server in addition to this process's.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self.address = folder / f"fork{next(_numbers)}"
        self._is_up = False  # whether the process has imported its libraries
        self._wait_lock = threading.Lock()  # replicas wait in several threads
        self._bound = bound_variables(os.environ)

        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self.address))
            listener.listen(1024)  # requests wait until the server has imported
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env={**os.environ, **settings},
            )

        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, which `wait` notices
            self._process.stdin.write(json.dumps(self._bound).encode() + b"\n")
            self._process.stdin.flush()
        atexit.register(self.end)

    @property
    def pid(self) -> int:
        """Return the id of the server process."""
        return self._process.pid

    def has_environment(self, environment: Mapping[str, str]) -> bool:
        """Return whether the server can fork a process with this environment, because its `bound_variables` equal the
        server's."""
        return bound_variables(environment) == self._bound

    def launcher(self, program: str) -> list[str]:
        """Return the arguments with which Python becomes the launcher of a fork that runs the module `program`."""
        return ["-I", "-S", str(Path(forklauncher.__file__)), str(self.address), program]

    def wait(self) -> bool:
        """Wait until the server has imported its libraries, and return True; return False if it has ended."""
        with self._wait_lock:
            assert self._process.stdout is not None
            # The server writes a byte once it is up. Without a byte it ended during its imports.
            self._is_up = self._is_up or bool(self._process.stdout.read(1))
            return self._is_up and self._process.poll() is None

    def end(self) -> None:
        """Kill the server, and remove its socket; no new server is started."""
        atexit.unregister(self.end)
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self.address.unlink(missing_ok=True)


def bound_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that must be equal in the server and its forks: all except FREE."""
    return {name: value for name, value in environment.items() if not name.startswith(FREE) and name != "_"}


class ForkRequest(NamedTuple):
    """A launcher's request for a process: its arguments, environment and files.

    Attributes:
        program: name of the module to run as the main program.
        limits: resource limits as (resource, soft limit, hard limit).
        environment: all environment variables.
        handles: file descriptors of standard input, output, error, and of the working directory.
    """

    program: str
    limits: list[tuple[int, ...]]
    environment: dict[bytes, bytes]
    handles: list[int]


def main(listener: socket.socket) -> None:
    """Import LIBRARIES, then fork a process for every request until standard input ends.

    In a fork, run the program that was asked for.
    """
    for signal_number in HELD:
        signal.signal(signal_number, signal.SIG_IGN)
    with suppress(OSError):
        Path("/proc/self/comm").write_text("forge-fork")  # for top and ps; forks rename themselves
    expected = json.loads(sys.stdin.buffer.readline())
    gc.disable()  # imports make hardly any garbage, and collecting takes a sixth of their time
    for name in LIBRARIES:
        with suppress(Exception):  # the process that needs it reports the error
            importlib.import_module(name)
    gc.freeze()  # a collection in a fork then does not copy the memory that it shares with the server

    gc.enable()
    with suppress(BrokenPipeError):  # the controller has ended
        os.write(1, b"y")  # `ForkServer.wait` reads it
    if (fork := serve_forks(listener, expected)) is not None:
        run_program(*fork)


def serve_forks(listener: socket.socket, expected: dict[str, str]) -> tuple[socket.socket, ForkRequest] | None:
    """Fork a process for every connection; return its connection and request in a fork, None in the server at its end.

    The server ends when its standard input does. A rejected launcher gets 0 instead of a process id.

    Args:
        expected: the `bound_variables` that a request's environment must have.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that have ended leave no zombies
    while True:
        ready, _, _ = select.select([sys.stdin, listener], [], [])
        if sys.stdin in ready:
            return None

        connection, _ = listener.accept()
        request = read_request(connection)

        if request is not None:
            # Only variables that libraries cannot have read may differ, and only a process of one thread forks safely.
            variables = {os.fsdecode(name): os.fsdecode(value) for name, value in request.environment.items()}
            pid = -1  # no fork
            if bound_variables(variables) == expected and len(os.listdir("/proc/self/task")) == 1:
                with suppress(OSError):  # no memory or no process is left
                    pid = os.fork()

            if pid == 0:  # in the fork
                listener.close()
                return connection, request
            for handle in request.handles:
                os.close(handle)
            if pid < 0:
                with suppress(OSError):  # the launcher has ended
                    connection.sendall(bytes(4))

        connection.close()


def read_request(launcher: socket.socket) -> ForkRequest | None:
    """Return the request of a launcher, as `forklauncher.ask_server` sends it; None if it is incomplete or late."""
    launcher.settimeout(REQUEST_TIMEOUT)
    handles: list[int] = []
    try:
        length, handles, _, _ = socket.recv_fds(launcher, 4, 4)
        message = receive_bytes(launcher, int.from_bytes(length, "little"))
        program, limit_text, *variables = message.split(b"\0")
        environment = dict(variable.split(b"=", 1) for variable in variables)
        limits = [tuple(map(int, limit.split(b":"))) for limit in limit_text.split(b",")]
        return ForkRequest(program.decode(), limits, environment, handles)
    except (OSError, ValueError):  # received handles stay open until they are closed
        for handle in handles:
            os.close(handle)
        return None


def run_program(launcher: socket.socket, request: ForkRequest) -> None:
    """Run the requested program in this fork, with the launcher's environment, limits, working directory and streams.

    Sends the process id to the launcher at the start, and the program's status at the end.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    # Not ignored, as programs that a component starts would inherit that, and SIGTERM is how the component ends them.
    signal.signal(signal.SIGTERM, lambda number, frame: None)

    *streams, folder = request.handles
    for descriptor, handle in enumerate(streams):  # standard input, output and error
        os.dup2(handle, descriptor)
        os.close(handle)
    os.fchdir(folder)
    os.close(folder)

    for limit, soft, hard in request.limits:
        resource.setrlimit(limit, (soft, hard))
    os.environ.clear()
    os.environb.update(request.environment)
    tempfile.tempdir = None  # what the server has cached: TMPDIR may differ
    if not sys.flags.safe_path:
        with suppress(FileNotFoundError):  # the working directory was removed
            sys.path[0] = os.getcwd()

    # Forks of one server would otherwise draw the same random numbers.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()

    # From here on the launcher sends nothing. The connection becomes readable when the launcher ends, and the kernel
    # then kills this process: SIGKILL is set as the signal of asynchronous input.
    launcher.settimeout(None)
    launcher.sendall(os.getpid().to_bytes(4, "little"))
    fcntl.fcntl(launcher, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(launcher, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(launcher, fcntl.F_SETFL, fcntl.fcntl(launcher, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([launcher], [], [], 0)[0]:  # it ended before that was set
        os.kill(os.getpid(), signal.SIGKILL)

    # A status as `os.wait` gives it has the exit code in its second byte; as in Python's own main program the code is 1
    # after an exception, or an exit with a text.
    sys.argv = [request.program]
    exit_code = 1
    try:
        runpy.run_module(request.program, run_name="__main__", alter_sys=True)
        exit_code = 0
    except SystemExit as ending:
        exit_code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        raise
    finally:
        launcher.sendall(struct.pack("=i", exit_code << 8))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
