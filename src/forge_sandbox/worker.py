"""Client of a sandbox process."""

import os
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge_envs.environment import InfrastructureError

from .inside import wire

START_TIMEOUT = 60.0  # seconds to start, with all imports
GRACE = 30.0  # seconds to reply, beyond a program's time limit: the machine may be busy
EXIT_TIMEOUT = 5.0  # seconds to exit by itself
_MODULES = ("syscalls", "wire", "seccomp", "namespaces", "limits", "program", "confine", "keeper", "zygote")
# The modules are sent as text: the process may not be able to read the files after a change of user or root.
_FOLDER = Path(__file__).parent / "inside"
_TEXTS = {name: (_FOLDER / f"{name}.py").read_text("utf-8") for name in _MODULES}
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

Header = dict[str, Any]  # of a message, see `inside.wire`
Settings = dict[str, Any]  # of a sandbox, as plain data


class SandboxError(InfrastructureError):
    """The sandbox failed, not a program in it."""


class Worker:
    """A process that runs one program at a time. Methods block and are called in one thread, except `interrupt`.

    Args:
        settings: "level"; "readable", "folder" (where a program starts), "limits" (of `resource`), "memory_mb",
            "cpu_seconds", "processes" and "output_kb". Of Python's programs also "path", "imports" and "file_mb"; of a
            command "network" ("gateway": the loopback only; "host"), "port" (where the caller listens, or None) and
            "writable" (folders by their paths inside).
        python: the interpreter.
        user: user id of the process; requires root.

    Attributes:
        descriptors: the listening socket of a command's `port`.

    Raises:
        SandboxError: the process failed to start.
    """

    def __init__(self, settings: Settings, python: str, user: int | None) -> None:
        owner: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
        self.interrupted = False
        self.descriptors: list[int] = []
        self._socket, child_socket = socket.socketpair()

        # A file, since a pipe that is not read would block verbose imports.
        self._stderr = open(os.memfd_create("stderr"), "rb")  # noqa: SIM115
        with child_socket:
            words = [python, "-I", "-S", "-X", "utf8", "-c", _BOOT, str(child_socket.fileno())]
            try:
                self._process = subprocess.Popen(
                    words,
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
        """Send a request and return the reply. SandboxError: it failed or timed out, and the worker must be killed."""
        return self._read_reply(limit + GRACE, wire.pack_message(header, *bodies))

    def settle(self) -> None:
        """Wait until all processes of the last program have ended. SandboxError: as `request`."""
        reply, _ = self._read_reply(GRACE)
        if not reply.get("over"):
            raise SandboxError(f"the sandbox's process sent {reply} instead of the end of a program")

    def interrupt(self) -> None:
        """Ask the worker to end with all its processes; a pending `request` raises SandboxError. Thread-safe."""
        self.interrupted = True
        with suppress(OSError):  # already ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """End the worker with all its processes, and wait for it."""
        self.interrupt()
        try:
            self._process.wait(EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket.close()
        self._stderr.close()

    def _read_reply(self, seconds: float, request: bytes = b"") -> tuple[Header, list[bytes]]:
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
        """Return the end of its stderr, once it has exited."""
        with suppress(subprocess.TimeoutExpired, ValueError):  # ValueError: closed concurrently
            self._process.wait(EXIT_TIMEOUT)
            size = os.fstat(self._stderr.fileno()).st_size
            text = os.pread(self._stderr.fileno(), 400, max(0, size - 400)).decode(errors="replace").strip()
            return f": {text}" if text and not self.interrupted else ""
        return ""
