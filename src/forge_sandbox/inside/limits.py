"""Limits of resources, and their usage."""

from __future__ import annotations

import os
import resource
import struct
from contextlib import suppress

from .syscalls import call
from .wire import Settings

# PR_CAPBSET_DROP of prctl.
_DROP_FROM_BOUNDS = 24
# Units of the numbers in /proc: pages of memory, and ticks of CPU time.
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = os.sysconf("SC_CLK_TCK")
_proc = -1  # descriptor of the /proc of the processes outside


def limit(settings: Settings, tasks: int | None) -> None:
    """Limit this process and its children.

    Args:
        tasks: maximum processes and threads of this user; None for no limit.
    """
    limits = {
        resource.RLIMIT_AS: settings["memory_mb"] << 20,
        resource.RLIMIT_FSIZE: settings["file_mb"] << 20,
        resource.RLIMIT_CPU: settings["cpu_seconds"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 64,
    }
    if tasks is not None:
        limits[resource.RLIMIT_NPROC] = tasks
    for kind, soft in limits.items():
        hard = soft + (kind == resource.RLIMIT_CPU)  # SIGXCPU comes first, then SIGKILL
        _, current = resource.getrlimit(kind)
        if current != resource.RLIM_INFINITY:  # lower limits of the caller remain
            soft = min(soft, current)
            hard = min(hard, current)
        resource.setrlimit(kind, (soft, hard))


def drop_bounds() -> None:
    """Empty the bounding set of capabilities, irreversibly. Call it as root before a change of the user, which loses
    the right to do so."""
    capability = 0
    with suppress(OSError):  # past the last one, or a user without capabilities
        while True:
            call("prctl", _DROP_FROM_BOUNDS, capability, 0, 0, 0)
            capability += 1


def drop_capabilities() -> None:
    """Drop all capabilities, irreversibly and also for executed files."""
    drop_bounds()
    call("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *(0,) * 6))


def tasks_of(user: int) -> int:
    """Return the number of processes and threads of a user, from /proc."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                folder = os.stat(f"/proc/{name}/task")
            except OSError:  # it has exited
                continue
            if folder.st_uid == user:
                count += folder.st_nlink - 2
    return count


def open_proc() -> None:
    """Use the current /proc from now on: a new namespace may have none."""
    global _proc
    _proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)


def self_pid() -> int:
    """Return the number of this process in that /proc, as in `descendants`."""
    return int(os.readlink("self", dir_fd=_proc))


def _open(path: str, flags: int = os.O_RDONLY) -> int:
    return os.open(path, flags, dir_fd=_proc)


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process."""
    processes = [pid]
    for parent in processes:
        try:
            tasks = _open(f"{parent}/task", os.O_RDONLY | os.O_DIRECTORY)
            try:
                threads = os.listdir(tasks)
            finally:
                os.close(tasks)
            for thread in threads:
                with open(f"{parent}/task/{thread}/children", opener=_open) as file:
                    processes.extend(map(int, file.read().split()))
        except OSError:  # it has exited
            continue
    return processes[1:]


def usage(processes: list[int]) -> tuple[int, float]:
    """Return resident bytes and CPU seconds of these processes; the CPU time includes ended children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    memory = 0
    seconds = children.ru_utime + children.ru_stime
    for pid in processes:
        try:
            with open(f"{pid}/stat", "rb", opener=_open) as file:
                numbers = file.read().rpartition(b")")[2].split()
        except OSError:  # it has exited
            continue
        seconds += sum(map(int, numbers[11:15])) / _TICK
        memory += int(numbers[21]) * _PAGE
    return memory, seconds


def proportional_memory(processes: list[int]) -> int:
    """Return bytes with shared pages counted once (PSS). Slower than `usage`."""
    memory = 0
    for pid in processes:
        try:
            with open(f"{pid}/smaps_rollup", "rb", opener=_open) as file:
                memory += next(int(line.split()[1]) << 10 for line in file if line.startswith(b"Pss:"))
        except (OSError, StopIteration):  # it has exited
            continue
    return memory
