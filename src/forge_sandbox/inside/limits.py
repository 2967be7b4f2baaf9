"""Limits of resources, and their usage."""

import os
import resource
import struct
from collections.abc import Mapping
from contextlib import suppress

from .syscalls import make_call

# PR_CAPBSET_DROP of prctl.
_DROP_FROM_BOUNDS = 24
# Units of the numbers in /proc: pages of memory, and ticks of CPU time.
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = os.sysconf("SC_CLK_TCK")
_proc = -1  # descriptor of the /proc of the processes outside


def limit_process(limits: Mapping[str, int], tasks: int | None) -> None:
    """Limit this process and its children.

    Args:
        limits: by the names of `resource`, without RLIMIT_.
        tasks: maximum processes and threads of this user; None for no limit.
    """
    for name, soft in {**limits, **({} if tasks is None else {"NPROC": tasks})}.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = soft + (name == "CPU")  # SIGXCPU comes first, then SIGKILL
        _, current = resource.getrlimit(kind)
        if current != resource.RLIM_INFINITY:  # lower limits of the caller remain
            soft, hard = min(soft, current), min(hard, current)
        resource.setrlimit(kind, (soft, hard))


def drop_bounds() -> None:
    """Empty the bounding set of capabilities, irreversibly. Call it as root before a change of the user, which loses
    the right to do so."""
    capability = 0
    with suppress(OSError):  # past the last one, or a user without capabilities
        while True:
            make_call("prctl", _DROP_FROM_BOUNDS, capability, 0, 0, 0)
            capability += 1


def drop_capabilities() -> None:
    """Drop all capabilities, irreversibly and also for executed files."""
    drop_bounds()
    make_call("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *(0,) * 6))


def open_proc() -> None:
    """Use the current /proc from now on: a new namespace may have none."""
    global _proc
    _proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)


def self_pid() -> int:
    """Return the number of this process in that /proc, as in `descendants`."""
    return int(os.readlink("self", dir_fd=_proc))


def _open_file(path: str, flags: int = os.O_RDONLY) -> int:
    return os.open(path, flags, dir_fd=_proc)


def list_descendants(pid: int) -> list[int]:
    """Return all descendants of a process."""
    processes = [pid]
    for parent in processes:
        try:
            tasks = _open_file(f"{parent}/task", os.O_RDONLY | os.O_DIRECTORY)
            try:
                threads = os.listdir(tasks)
            finally:
                os.close(tasks)
            for thread in threads:
                with open(f"{parent}/task/{thread}/children", opener=_open_file) as file:
                    processes.extend(map(int, file.read().split()))
        except OSError:  # it has exited
            continue
    return processes[1:]


def measure_usage(processes: list[int]) -> tuple[int, float]:
    """Return resident bytes and CPU seconds of these processes; the CPU time includes ended children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    memory = 0
    seconds = children.ru_utime + children.ru_stime
    for pid in processes:
        try:
            with open(f"{pid}/stat", "rb", opener=_open_file) as file:
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
            with open(f"{pid}/smaps_rollup", "rb", opener=_open_file) as file:
                memory += next(int(line.split()[1]) << 10 for line in file if line.startswith(b"Pss:"))
        except (OSError, StopIteration):  # it has exited
            continue
    return memory
