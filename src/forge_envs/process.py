"""Subprocesses that end, with their process group, when stopped or when this process ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Self

from forge_envs.environment import InfrastructureError

TAIL = 2000  # characters of a log that an error shows
GRACE = 5.0  # seconds from SIGTERM to SIGKILL

# A keeper process stands between this process and the program. The write end of its lifeline pipe is open only in this
# process: however this process ends, even by SIGKILL, the keeper sees the end of the pipe and kills the process group.
# A fork of this process also holds the pipe, so the keeper checks its parent once a second. If the keeper dies, so does
# the program, by PR_SET_PDEATHSIG (1).
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
    """A running program, whose output is logged to a temporary file. When it ends, the rest of its process group is
    killed."""

    def __init__(self, process: Process, name: str, lifeline: int, log: IO[bytes]) -> None:
        self.name = name
        self._process = process
        self._lifeline = lifeline
        self._log = log
        self._gone = False
        self._sweeper = asyncio.create_task(self._kill_rest())

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Self:
        """Start a program; one that does not exist ends at once with exit code 1.

        Args:
            cwd: working directory.
            env: variables added to those of this process.

        Raises:
            InfrastructureError: no process could be started.
        """
        log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - it is closed with the program
        keeper_end, lifeline = os.pipe()
        # Isolated (-I, -S): a file in the working directory cannot take the place of a module of the keeper.
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _KEEPER, str(keeper_end), str(os.getpid()), *command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=cwd,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                pass_fds=(keeper_end,),
            )
        except BaseException as error:
            os.close(lifeline)
            log.close()
            if isinstance(error, OSError):
                raise InfrastructureError(f"{command[0]} could not be started: {error}") from error
            raise
        finally:
            os.close(keeper_end)
        return cls(process, command[0], lifeline, log)

    @property
    def pid(self) -> int:
        """Process group of the program and its children."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code; None while running, 128 + n after signal n."""
        return self._process.returncode

    def describe_end(self) -> str:
        """Describe its exit code and the end of its log, for an error."""
        code = self.returncode
        state = "is still running" if code is None else f"ended with exit code {code}"
        with suppress(ValueError):  # not a signal
            state = f"was ended by {signal.Signals((code or 0) - 128).name}"
        return f"{self.name} {state}; its log ends with:\n{self.tail() or '(nothing)'}"

    def tail(self) -> str:
        """The end of its log, at most TAIL bytes."""
        if self._log.closed:
            return "(closed)"
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), TAIL, max(0, size - TAIL)).decode(errors="replace").strip()

    async def wait(self, limit: float) -> None:
        """Wait until it has ended, at most `limit` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self._process.wait()

    async def stop(self, grace: float = GRACE) -> None:
        """Send SIGTERM to the process group, and SIGKILL after `grace` seconds; idempotent."""
        if self._lifeline < 0:
            return
        lifeline = self._lifeline
        self._lifeline = -1
        try:
            if grace > 0:
                self._signal(signal.SIGTERM)
                await self.wait(grace)
        finally:
            # The lifeline is closed last: at the end of this pipe the keeper kills the group.
            self._signal(signal.SIGKILL)
            os.close(lifeline)
            self._log.close()
        await self.wait(GRACE)

    async def _kill_rest(self) -> None:
        await self._process.wait()
        self._signal(signal.SIGKILL)
        self._gone = True  # from now on the id may be reused

    def _signal(self, number: int) -> None:
        if self._gone:
            return
        with suppress(ProcessLookupError, PermissionError):  # PermissionError: zombies on macOS
            os.killpg(self._process.pid, number)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


def copy_command(command: Sequence[str]) -> list[str]:
    """Copy a command. ValueError: it is a string, or empty."""
    if not command or isinstance(command, str):
        raise ValueError(f"a command must be a list of its words, got {command!r}")
    return list(command)
