"""The client of a sandbox's process."""

import os
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge_envs.environment import InfrastructureError

from .inside import wire
from .inside.wire import Header, Settings

START_TIMEOUT = 60.0  # seconds within which the process must have started, with all imports
GRACE = 30.0  # seconds for a reply after a program's time limit: the machine may be busy
EXIT_TIMEOUT = 5.0  # seconds within which the process must exit by itself
_MODULES = ("syscalls", "wire", "seccomp", "namespaces", "limits", "program", "keeper", "zygote")
# The modules are sent as text: as another user, or with another root, the process may not be able to read the files.
_FOLDER = Path(__file__).parent / "inside"
_TEXTS = {name: (_FOLDER / f"{name}.py").read_text("utf-8") for name in _MODULES}
# The program of the process: it reads a message as of `inside.wire` from the descriptor in its argument, makes the
# package `inside` of the modules in it, and runs the zygote.
_BOOT = """
import json, os, struct, sys, types
def exactly(size):
    parts = b""
    while len(parts) < size:
        part = os.read(source, size - len(parts))
        if not part:
            sys.exit(1)
        parts += part
    return parts
source = int(sys.argv[1])
header, sizes = json.loads(exactly(struct.unpack("I", exactly(4))[0]))
package = sys.modules["inside"] = types.ModuleType("inside")
package.__path__ = []
for name, text in header["modules"].items():
    module = sys.modules["inside." + name] = types.ModuleType("inside." + name)
    module.__package__ = "inside"
    setattr(package, name, module)
    exec(compile(text, "inside/" + name + ".py", "exec"), module.__dict__)
package.zygote.main(source, header["settings"])
"""


class SandboxError(InfrastructureError):
    """Error of the sandbox itself, not of a program in it."""


class Worker:
    """A sandbox's process, which runs one program at a time.

    The methods block, and must be called in one thread, except `interrupt`.

    Args:
        settings: for all programs "level", "readable", "folder" (where a program starts), "limits" (by the names of
            `resource`), "memory_mb", "cpu_seconds", "processes" and "output_kb". For Python programs also "path",
            "imports" and "file_mb". For a command also "network" ("gateway" for the loopback only, or "host"), "port"
            (of the loopback, at which the caller accepts its connections; None: none) and "writable" (folders by their
            paths in the sandbox).
        python: the interpreter of the process.
        user: the id of the user that the process runs as, which requires root; None: this process's user.

    Attributes:
        interrupted: whether `interrupt` was called.
        descriptors: the descriptor of the socket that listens at a command's "port", if it has one.

    Raises:
        SandboxError: the process failed to start.
    """

    def __init__(self, settings: Settings, python: str, user: int | None) -> None:
        owner: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
        self.interrupted = False
        self.descriptors: list[int] = []
        self._socket, child_socket = socket.socketpair()

        # A file in memory: a pipe, which nothing reads, would block once imports have written much to it.
        self._stderr = open(os.memfd_create("stderr"), "rb")  # noqa: SIM115
        with child_socket:
            try:
                self._process = subprocess.Popen(
                    [python, "-I", "-S", "-X", "utf8", "-c", _BOOT, str(child_socket.fileno())],
                    **owner,
                    env={},
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._stderr,
                    pass_fds=(child_socket.fileno(),),
                    start_new_session=True,
                )
            except OSError as error:
                self._socket.close()
                self._stderr.close()
                raise SandboxError(f"{python} could not be started: {error}") from error

        try:
            self.request({"modules": _TEXTS, "settings": settings}, limit=START_TIMEOUT - GRACE)
        except BaseException:
            self.kill()
            raise

    def request(self, header: Header, *bodies: bytes, limit: float) -> tuple[Header, list[bytes]]:
        """Send a request, and return the header and the bodies of the reply.

        Args:
            header: the request, such as {"time_limit": 5.0}.
            bodies: the program and its input.
            limit: the seconds that the program may take.

        Raises:
            SandboxError: the process failed or gave no reply in time; then the worker must be killed.
        """
        return self._read_reply(limit + GRACE, wire.pack_message(header, *bodies))

    def settle(self) -> None:
        """Wait until all processes of the last program have ended; raises SandboxError as `request` does."""
        reply, _ = self._read_reply(GRACE)
        if not reply.get("over"):
            raise SandboxError(f"the sandbox's process sent the unexpected reply {reply} instead of a program's result")

    def interrupt(self) -> None:
        """Terminate the process with all its programs, so that a pending `request` raises SandboxError.

        It does not wait for the end, and may be called in any thread.
        """
        self.interrupted = True
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """Kill the process with all its programs, and wait for its end."""
        self.interrupt()
        try:
            self._process.wait(EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket.close()
        self._stderr.close()

    def _read_reply(self, seconds: float, request: bytes = b"") -> tuple[Header, list[bytes]]:
        # Send a request, unless it is empty, and return the next message, for which it waits `seconds` at most.
        deadline = time.monotonic() + seconds

        def read_bytes(size: int) -> bytes:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            data, descriptors, _, _ = socket.recv_fds(self._socket, size, 1)
            self.descriptors += descriptors
            return data

        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(request)
            header, bodies = wire.unpack_message(read_bytes)
        except TimeoutError:
            raise SandboxError(f"the sandbox's process gave no answer within {seconds:g} s") from None
        except (EOFError, ConnectionError):
            raise SandboxError(f"the sandbox's process has ended{self._stderr_tail()}") from None
        except (OSError, ValueError) as error:  # closed concurrently
            raise SandboxError(f"the sandbox's process was ended ({error})") from error

        if "failed" in header:
            raise SandboxError(f"confining a program failed: {header['failed']}")
        return header, bodies

    def _stderr_tail(self) -> str:
        """Return ": " and the last 400 bytes of the process's stderr, once it has exited; "" if there are none."""
        with suppress(subprocess.TimeoutExpired, ValueError):  # ValueError: closed concurrently
            self._process.wait(EXIT_TIMEOUT)
            size = os.fstat(self._stderr.fileno()).st_size
            text = os.pread(self._stderr.fileno(), 400, max(0, size - 400)).decode(errors="replace").strip()
            return f": {text}" if text and not self.interrupted else ""
        return ""
