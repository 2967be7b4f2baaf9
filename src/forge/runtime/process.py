"""Processes of this machine, by their ids: watch and kill them, read their stacks, and end with a parent."""

import asyncio
import ctypes
import os
import shutil
import signal
import socket
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

DUMP_TIMEOUT = 15.0  # seconds; py-spy takes one, or many on a busy machine
PR_SET_PDEATHSIG = 1
_TICKS = os.sysconf("SC_CLK_TCK")


@cache
def machine_id() -> str:
    """Return an id of the machine and namespace in which this process runs: "<host name> <boot id> <namespace of
    process ids>".

    Process ids of two processes can be compared only if their ids are equal: the machine has not been restarted
    between them, and they are in the same container.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/pid').st_ino}"


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process the signal `number` when its parent, process `parent`, ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended before the line above: the kernel then sends nothing
        os.kill(os.getpid(), number)


class Activity(NamedTuple):
    """The activity of a process at one moment.

    Attributes:
        cpu_seconds: CPU time that it has used since its start.
        wants_cpu: whether one of its threads runs, or waits for a core, a disk, or memory that was swapped out.
    """

    cpu_seconds: float
    wants_cpu: bool


def activity_of(pid: int) -> Activity:
    """Return the activity of a process of this machine; Activity(0.0, False) if it has ended."""
    try:
        fields = _read_fields(f"/proc/{pid}/stat")
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return Activity(0.0, False)

    ticks = int(fields[11]) + int(fields[12])  # user and system time
    states = (_read_state(f"/proc/{pid}/task/{thread}/stat") for thread in threads)
    # R: running or waiting for a core; D: in an uninterruptible wait, as for a disk.
    return Activity(ticks / _TICKS, any(state in ("R", "D") for state in states))


def is_stopped(pid: int) -> bool:
    """Return whether a process exists and was stopped by a signal (SIGSTOP)."""
    return _read_state(f"/proc/{pid}/stat") == "T"


# Return the fields of a stat file in /proc from the state on, which follows the name in parentheses.
def _read_fields(path: str) -> list[str]:
    return Path(path).read_text().rsplit(")", 1)[1].split()


def _read_state(path: str) -> str:
    try:
        return _read_fields(path)[0]
    except OSError:  # the process or thread has ended
        return ""


def parents_of(pid: int) -> Iterator[int]:
    """Yield the id of a process's parent, of its parent's parent, and so on; none for a process that has ended."""
    with suppress(OSError):
        while pid > 1:
            pid = int(_read_fields(f"/proc/{pid}/stat")[1])
            yield pid


class Process:
    """A process of this machine that is watched by its pid file descriptor, which no later process can take over.

    Args:
        ended: called in the running event loop when the process ends, or soon if it has ended already.
    """

    _handle: int | None = None

    def __init__(self, pid: int, ended: Callable[[], None]) -> None:
        self.pid, self._ended = pid, ended
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
        """Return whether the process exists and was stopped by a signal (SIGSTOP)."""
        return is_stopped(self.pid)

    async def activity(self) -> Activity | None:
        """Return the activity of the process, see `activity_of`; None if it cannot be seen from here."""
        return activity_of(self.pid)

    def kill(self) -> None:
        """Send SIGKILL to the process, if it has not ended yet and is still watched."""
        if self._handle is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    async def stacks(self) -> str:
        """Return the Python stacks of its threads, see `read_stacks`."""
        return await read_stacks(self.pid)

    def _on_end(self) -> None:
        self.close()  # otherwise the handle stays readable, and this method is called again
        self._ended()

    def close(self) -> None:
        """Stop watching the process: `ended` is no longer called."""
        if self._handle is not None:
            asyncio.get_running_loop().remove_reader(self._handle)
            os.close(self._handle)
            self._handle = None


async def read_stacks(pid: int) -> str:
    """Return the Python stacks of a process's threads as indented lines, or a line that says why there are none.

    py-spy reads them, without stopping the process.
    """
    # The py-spy of this environment is preferred: it fits this Python.
    program = shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")
    if program is None:
        return "  (py-spy is not installed)"

    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        program, "dump", "--nonblocking", "--pid", str(pid), stdout=pipe, stderr=pipe
    )

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
