"""The caller's side of a sandbox process."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge.envs.environment import InfrastructureError

from .inside import wire

_START = 60.0  # seconds to start, with all imports
_GRACE = 30.0  # seconds to answer, beyond a program's time limit
_LEAVE = 5.0  # seconds to exit by itself
_MODULES = (
    *("syscalls", "wire", "seccomp", "landlock", "namespaces", "limits", "program", "confine", "place", "bubblewrap"),
    *("keeper", "zygote"),
)
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
bodies = [exactly(size) for size in sizes]
package = sys.modules["inside"] = types.ModuleType("inside")
package.__path__ = []
for name, text in header["modules"].items():
    module = sys.modules["inside." + name] = types.ModuleType("inside." + name)
    module.__package__ = "inside"
    setattr(package, name, module)
    exec(compile(text, "inside/" + name + ".py", "exec"), module.__dict__)
if header["main"] == "zygote":
    package.zygote.main(source, header["settings"], header["modules"])
else:
    package.bubblewrap.main(source, header, bodies[0])
"""


class SandboxError(InfrastructureError):
    """The sandbox failed, not a program in it."""


class Worker:
    """A process that runs one program at a time. Methods block and are called in one thread, except `kill`.

    Args:
        settings: of `forge_sandbox.Sandbox`.
        python: the interpreter.
        user: user id of the process; requires root.

    Raises:
        SandboxError: it failed to start.
    """

    def __init__(self, settings: dict[str, Any], python: str, user: int | None) -> None:
        whose: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
        self.interrupted = False
        self._socket, other = socket.socketpair()
        # A file, since a pipe that is not read would block verbose imports.
        self._stderr = open(os.memfd_create("stderr"), "rb")  # noqa: SIM115
        with other:
            words = [python, "-I", "-S", "-X", "utf8", "-c", _BOOT, str(other.fileno())]
            try:
                self._process = subprocess.Popen(
                    words,
                    **whose,
                    env={},
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._stderr,
                    pass_fds=(other.fileno(),),
                    start_new_session=True,
                )
            except OSError as error:
                self._socket.close()
                self._stderr.close()
                raise SandboxError(f"{python} could not be started: {error}") from error
        try:
            header = {"modules": _TEXTS, "main": "zygote", "settings": settings | {"boot": _BOOT}}
            self.ask(header, limit=_START - _GRACE)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def ask(self, header: dict[str, Any], *bodies: bytes, limit: float) -> tuple[dict[str, Any], list[bytes]]:
        """Send a request and return the answer. SandboxError: it failed or timed out and must be killed."""
        self._deadline = time.monotonic() + limit + _GRACE
        try:
            self._socket.settimeout(limit + _GRACE)
            self._socket.sendall(wire.pack(header, *bodies))
            return self._hear()
        except TimeoutError:
            raise SandboxError(f"the sandbox's process gave no answer within {limit + _GRACE:g} s") from None
        except (EOFError, ConnectionError):
            raise SandboxError(f"the sandbox's process has ended{self._last_words()}") from None
        except (OSError, ValueError) as error:  # closed concurrently
            raise SandboxError(f"the sandbox's process was ended ({error})") from error

    def settle(self) -> None:
        """Wait until all processes of the last program are gone. SandboxError: as `ask`."""
        self._deadline = time.monotonic() + _GRACE
        try:
            answer, _ = self._hear()
        except (OSError, EOFError) as error:
            raise SandboxError(f"the sandbox's process has ended ({error})") from error
        if not answer.get("over"):
            raise SandboxError(f"the sandbox's process sent {answer} instead of the end of a program")

    def interrupt(self) -> None:
        """Ask it to end with all that it started; a pending `ask` raises SandboxError. Thread-safe."""
        self.interrupted = True
        with suppress(OSError):  # already ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """End it with all that it started, and wait for it."""
        self.interrupt()
        try:
            self._process.wait(_LEAVE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket.close()
        self._stderr.close()

    def _hear(self) -> tuple[dict[str, Any], list[bytes]]:
        def read(size: int) -> bytes:
            self._socket.settimeout(max(0.001, self._deadline - time.monotonic()))
            return self._socket.recv(size)

        header, bodies = wire.unpack(read)
        if "failed" in header:
            raise SandboxError(f"confining a program failed: {header['failed']}")
        return header, bodies

    def _last_words(self) -> str:
        """The end of its stderr, once it has exited."""
        if self.interrupted:
            return ""
        try:
            self._process.wait(_LEAVE)
            stderr = self._stderr.fileno()
        except (subprocess.TimeoutExpired, ValueError):  # ValueError: closed concurrently
            return ""
        text = os.pread(stderr, 4096, max(0, os.fstat(stderr).st_size - 4096)).decode(errors="replace").strip()
        return f": {text[-400:]}" if text else ""
