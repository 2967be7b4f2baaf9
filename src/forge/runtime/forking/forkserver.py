"""Fork server: a process that has imported PyTorch and transformers, and forks the processes of a run.

Importing them takes 3 to 5 CPU-seconds in each process; a fork of a process that has imported them has them at once,
and then stands by for its launcher (`standby.py`). A fork outlives the server.

The fork is safe because the server has one thread and opens no accelerator. The server does not fork when it has more
than one thread, or when a variable of the environment differs that a library may have read during its import.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import itertools
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from .standby import HELD, become, read_request, stand_by

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
# compilers are those of the server: PyTorch sets them in a controller that compiles something.
FREE = (
    *("HYPERACTOR_", "MONARCH_", "FORGE_", "PYTEST_", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
)
LIVES = 3  # servers in a row that end within SOUND_AFTER seconds, as when memory is short
SOUND_AFTER = 60.0

log = logging.getLogger(__name__)
_numbers = itertools.count()


class ForkServer:
    """The fork server of this process. It ends with the process; its forks do not.

    Args:
        folder: a private folder, for its socket.
        settings: further variables of its environment.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self.address = folder / f"fork{next(_numbers)}"
        self._settings = settings
        self._lives = LIVES
        self._reviving = threading.Lock()
        self._start()
        atexit.register(self.end)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def has_environment(self, environment: Mapping[str, str]) -> bool:
        """Whether it forks processes with these variables, where they differ only in those that no library reads."""
        return bound(environment) == self._bound

    def revive(self, patience: float = 0.0) -> bool:
        """Start another server if this one ends within `patience` seconds; return whether another one runs."""
        server = self._process
        with self._reviving, suppress(subprocess.TimeoutExpired):
            status = server.wait(patience)
            # Another thread may have replaced it already, and a server that lived long restores all lives.
            if server is self._process and self._lives:
                cause = signal.Signals(-status).name if status < 0 else f"exit status {status}"
                self._lives = self._lives - 1 if time.monotonic() - self._began < SOUND_AFTER else LIVES - 1
                outcome = "another one is started" if self._lives else "processes are started without it from now on"
                log.warning("the fork server (process %d) ended with %s: %s", server.pid, cause, outcome)
                self._close()
                if self._lives:
                    self._start()
            return self._lives > 0
        return False

    def end(self) -> None:
        """End the server."""
        atexit.unregister(self.end)
        self._lives = 0
        self._process.kill()
        self._process.wait()
        self._close()

    def _start(self) -> None:
        self._began = time.monotonic()
        self._bound = bound(os.environ)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self.address))
            listener.listen(1024)  # requests wait until the server has imported
            self._process = subprocess.Popen(
                [sys.executable, "-m", "forge.runtime.forking.forkserver", str(listener.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                env={**os.environ, **self._settings},
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended: processes are started without it
            self._process.stdin.write(json.dumps(self._bound).encode() + b"\n")
            self._process.stdin.flush()

    def _close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self.address.unlink(missing_ok=True)


def bound(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that must be equal in the server and in a process that it forks."""
    return {name: value for name, value in environment.items() if not name.startswith(FREE) and name != "_"}


def main(listener: socket.socket) -> None:
    """Serve until standard input ends; in a fork, stand by."""
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
    if serve(listener, expected):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        stand_by()


def serve(listener: socket.socket, expected: dict[str, str]) -> bool:
    """Fork for every connection, until standard input ends; return whether this is a fork."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets forks that ended
    while True:
        ready, _, _ = select.select([sys.stdin, listener], [], [])
        if sys.stdin in ready:
            return False
        connection, _ = listener.accept()
        with connection:
            request = read_request(connection)
            pid = -1
            if request is None:
                continue
            # Only variables that libraries cannot have read may differ, and only a process of one thread forks safely.
            same_environment = (
                bound({os.fsdecode(k): os.fsdecode(v) for k, v in request.environment.items()}) == expected
            )
            if same_environment and len(os.listdir("/proc/self/task")) == 1:
                with suppress(OSError):  # no memory or no process is left
                    pid = os.fork()
            if pid == 0:
                listener.close()
                become(request)
                return True
            for handle in request.handles:
                os.close(handle)
            with suppress(OSError):  # the controller ended
                connection.sendall(max(pid, 0).to_bytes(4, "little"))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
