"""A program of its own that ends, with all that it started, when it is stopped or when this process ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import IO, Self

from forge.envs.environment import InfrastructureError

TAIL = 2000  # characters of a log that an error shows
GRACE = 5.0  # seconds from SIGTERM to SIGKILL

# It stands between this process and the program. The write end of its lifeline is open in this process and in none that
# it executes: whatever way this process ends, even SIGKILL, the lifeline then ends too, and the program's process group
# is killed. A fork of this process keeps it open, though, so once a second the keeper looks whose child it is. Its own
# death kills the program: the kernel tells the death of a parent's thread, and this one has but one.
_KEEPER = """
import ctypes, os, select, signal, subprocess, sys
lifeline, parent, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
def bound():
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
signal.signal(signal.SIGTERM, lambda *_: None)
woken, wake = os.pipe()
os.set_blocking(wake, False)
signal.set_wakeup_fd(wake)
signal.signal(signal.SIGCHLD, lambda *_: None)
try:
    child = subprocess.Popen(command, preexec_fn=bound)
except OSError as error:
    sys.exit(f"{command[0]}: {error.strerror}")
devnull = os.open(os.devnull, os.O_RDWR)
os.dup2(devnull, 0), os.dup2(devnull, 1)
while child.poll() is None:
    ready = select.select([lifeline, woken], [], [], 1)[0]
    if lifeline in ready or os.getppid() != parent:
        os.killpg(0, signal.SIGKILL)
    if woken in ready:
        os.read(woken, 1024)
sys.exit(child.returncode if child.returncode >= 0 else 128 - child.returncode)
"""


class Program:
    """A running program. With `pipes` its input and output are `stdin`, `stdout`; the rest of what it says is its log,
    a temporary file of any length. What it leaves running in its process group when it ends is killed."""

    def __init__(self, process: Process, name: str, lifeline: int, log: IO[bytes]) -> None:
        self.name, self._process, self._lifeline, self._log = name, process, lifeline, log
        self.stdin, self.stdout = process.stdin, process.stdout
        self._gone, self._watch = False, asyncio.create_task(self._sweep())

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        pipes: bool = False,
        line_limit: int = 1 << 16,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Self:
        """`env` is added to this process's own; `line_limit` is the longest line in bytes that `stdout` reads.

        InfrastructureError: no process can be had. A program that is not there ends at once with exit code 1.
        """
        log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - it is closed with the program
        reading, lifeline = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _KEEPER, str(reading), str(os.getpid()), *command),
                stdin=asyncio.subprocess.PIPE if pipes else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if pipes else log,
                stderr=log,
                limit=line_limit,
                cwd=cwd,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                pass_fds=(reading,),
            )
        except BaseException as error:
            os.close(lifeline)
            log.close()
            if isinstance(error, OSError):
                raise InfrastructureError(f"{command[0]} could not be started: {error}") from error
            raise
        finally:
            os.close(reading)
        return cls(process, command[0], lifeline, log)

    @property
    def pid(self) -> int:
        """Of the process group, which the program and what it starts belong to unless they leave it."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; 128 + n if signal n ended it."""
        return self._process.returncode

    def ended(self) -> str:
        """How it ended and what it said last, for an error."""
        code = self.returncode
        how = "still runs" if code is None else f"ended with exit code {code}" if code <= 128 else _ending(code)
        return f"{self.name} {how}; its log ends with:\n{self.tail() or '(nothing)'}"

    def tail(self) -> str:
        """The end of its log."""
        if self._log.closed:
            return "(closed)"
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), TAIL, max(0, size - TAIL)).decode(errors="replace").strip()

    async def wait(self, limit: float) -> None:
        """Until it has ended, for at most `limit` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self._process.wait()

    async def stop(self, grace: float = GRACE) -> None:
        """SIGTERM to the process group, and SIGKILL to what is left of it after `grace` seconds. It may be repeated."""
        if self._lifeline < 0:
            return
        lifeline, self._lifeline = self._lifeline, -1
        try:
            if self.stdin is not None:
                self.stdin.close()
            if grace > 0:
                self._signal(signal.SIGTERM)
                await self.wait(grace)
        finally:
            self._signal(signal.SIGKILL)
            os.close(lifeline)
            self._log.close()
        await self.wait(GRACE)

    async def _sweep(self) -> None:
        await self._process.wait()
        self._signal(signal.SIGKILL)
        self._gone = True  # from now on the group's number may become another's

    def _signal(self, number: int) -> None:
        if self._gone:
            return
        with suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS says so of a group of zombies
            os.killpg(self._process.pid, number)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


def words(command: Sequence[str]) -> list[str]:
    """The words of a command. ValueError: it is one text, or nothing."""
    if not command or isinstance(command, str):
        raise ValueError(f"a command must be a list of its words, got {command!r}")
    return list(command)


def _ending(code: int) -> str:
    try:
        return f"was ended by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"ended with exit code {code}"
