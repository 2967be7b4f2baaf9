"""Processes of this machine by their ids: watch, kill, and read their stacks."""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

DUMP_TIMEOUT = 15.0  # seconds; py-spy takes one, or many on a busy machine
PR_SET_PDEATHSIG = 1
_TICKS = os.sysconf("SC_CLK_TCK")


@cache
def machine_id() -> str:
    """Return the name of this machine, with what tells its process ids from those of others: its boot, and the
    container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/pid').st_ino}"


class Activity(NamedTuple):
    """CPU time that a process has used, in seconds, and whether a thread of it runs or waits for a core or for memory
    that was swapped out."""

    cpu_seconds: float
    wants_cpu: bool


def activity_of(pid: int) -> Activity:
    """The activity of a process of this machine; none if it has ended."""
    return Activity(cpu_seconds(pid), wants_cpu(pid))


def cpu_seconds(pid: int) -> float:
    """CPU time that a process of this machine has used; 0 if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def wants_cpu(pid: int) -> bool:
    """Whether a thread of a process runs, waits for a core, or for memory that was swapped out."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return any(_state(f"/proc/{pid}/task/{thread}/stat") in ("R", "D") for thread in threads)


def _state(path: str) -> str:
    try:
        return Path(path).read_text().rsplit(")", 1)[1].split()[0]
    except OSError:  # the thread ended
        return ""


class Watched(Protocol):
    """A process that a controller watches, on this machine or another."""

    pid: int

    @property
    def stopped(self) -> bool:
        """Whether it is known to be stopped by a signal."""

    @property
    def alive(self) -> bool:
        """Whether it is known to run, or to be stopped by a signal."""

    def kill(self) -> None:
        """End it by force, if that is possible and allowed."""

    async def activity(self) -> Activity | None:
        """Return what it does; None if nothing tells."""

    async def stacks(self) -> str:
        """Return the Python stack of each of its threads, or why there is none."""

    def close(self) -> None:
        """Stop watching it."""


class Process:
    """One process by its pid file descriptor, so that it is never confused with a later process of the same id."""

    def __init__(self, pid: int, ended: Callable[[], None]) -> None:
        self.pid = pid
        self._ended = ended
        self._handle: int | None = None
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:
            asyncio.get_running_loop().call_soon(ended)
            return
        asyncio.get_running_loop().add_reader(self._handle, self._on_end)

    def __str__(self) -> str:
        return str(self.pid)

    @property
    def stopped(self) -> bool:
        """Whether it exists and was stopped by a signal (SIGSTOP)."""
        return is_stopped(self.pid)

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        if self._handle is None:
            return False
        endings = select.poll()
        endings.register(self._handle, select.POLLIN)
        return not endings.poll(0)

    async def activity(self) -> Activity:
        """Return what it does."""
        return activity_of(self.pid)

    def kill(self) -> None:
        """Send SIGKILL, if it has not ended yet."""
        if self._handle is not None:
            try:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            except ProcessLookupError:
                return

    async def stacks(self) -> str:
        """Return the Python stack of each of its threads, see `stacks`."""
        return await stacks(self.pid)

    def _on_end(self) -> None:
        self.close()  # otherwise the handle stays readable, and this is called again
        self._ended()

    def close(self) -> None:
        """Stop watching it."""
        if self._handle is not None:
            asyncio.get_running_loop().remove_reader(self._handle)
            os.close(self._handle)
            self._handle = None


def is_stopped(pid: int) -> bool:
    """Whether a process exists and was stopped by a signal (SIGSTOP)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except OSError:
        return False


def descends(pid: int, ancestor: int) -> bool:
    """Whether a process exists and was started by `ancestor`, or by one that it started."""
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            return False
        if pid == ancestor:
            return True
    return False


def run_as_child(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end and return its exit code. This process's SIGTERM and SIGUSR1 are forwarded, and the
    command gets SIGTERM when this process is lost; a terminal sends Ctrl-C to both."""
    libc = ctypes.CDLL(None)
    process = subprocess.Popen(
        command, env=dict(environment), preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    )
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: process.send_signal(number))
    signal.signal(signal.SIGINT, lambda *_: None)
    return process.wait()


async def stacks(pid: int) -> str:
    """Return the Python stacks of a process's threads, read by py-spy without stopping it, or the reason for none."""
    # The py-spy of this environment is preferred: it fits this Python.
    program = shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")
    if program is None:
        return "  (py-spy is not installed)"
    command = (program, "dump", "--nonblocking", "--pid", str(pid))
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        return f"  (py-spy could not be started: {error})"
    # The report of a hang must not hang itself.
    try:
        out, errors = await asyncio.wait_for(process.communicate(), DUMP_TIMEOUT)
    except TimeoutError:
        return f"  (py-spy gave no answer within {DUMP_TIMEOUT:g} s)"
    finally:
        if process.returncode is None:
            process.kill()
    text = out.decode(errors="replace") if process.returncode == 0 else f"(py-spy failed: {errors.decode().strip()})"
    return "\n".join(f"  {line}" for line in text.strip().splitlines())
