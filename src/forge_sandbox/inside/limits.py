"""What a process may take, and what it has taken."""

from __future__ import annotations

import os
import resource
import struct
from contextlib import suppress
from typing import Any

from .syscalls import call

_DROP_FROM_BOUNDS = 24
_PAGE, _TICK = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


def limit(settings: dict[str, Any], tasks: int | None) -> None:
    """Limits for this process and what it starts.

    Args:
        tasks: most processes and threads of this user, where they are counted.
    """
    memory, size = settings["memory_mb"] << 20, settings["file_mb"] << 20
    for what, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, size),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 64),
    ):
        _set(what, most, most)
    _set(resource.RLIMIT_CPU, settings["cpu_seconds"], settings["cpu_seconds"] + 1)
    if tasks is not None:
        _set(resource.RLIMIT_NPROC, tasks, tasks)


def _set(what: int, soft: int, hard: int) -> None:
    _, most = resource.getrlimit(what)  # of the user that started all this: lower ones stay
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(what, (soft, hard))


def drop_capabilities() -> None:
    """For good: also what is executed gets none."""
    capability = 0
    with suppress(OSError):  # beyond the last one, or a user who has none to drop
        while True:
            call("prctl", _DROP_FROM_BOUNDS, capability, 0, 0, 0)
            capability += 1
    call("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *(0,) * 6))


def tasks_of(user: int) -> int:
    """Processes and threads of a user, by /proc."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                folder = os.stat(f"/proc/{name}/task")
            except OSError:  # it has ended
                continue
            if folder.st_uid == user:
                count += folder.st_nlink - 2
    return count


def below(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    found = [pid]
    for parent in found:
        try:
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children") as file:
                    found.extend(map(int, file.read().split()))
        except OSError:  # it has ended
            continue
    return found[1:]


def taken(processes: list[int]) -> tuple[int, float]:
    """Bytes of memory, and CPU seconds, of these and of children that have ended, also one's own."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    memory, seconds = 0, used.ru_utime + used.ru_stime
    for pid in processes:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                numbers = file.read().rpartition(b")")[2].split()
        except OSError:  # it has ended
            continue
        seconds += sum(map(int, numbers[11:15])) / _TICK
        memory += int(numbers[21]) * _PAGE
    return memory, seconds


def shared_out(processes: list[int]) -> int:
    """The bytes where what processes share is counted once. Slower."""
    memory = 0
    for pid in processes:
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                memory += next(int(line.split()[1]) << 10 for line in file if line.startswith(b"Pss:"))
        except (OSError, StopIteration):  # it has ended
            continue
    return memory
