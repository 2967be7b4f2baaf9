"""Limits of a program's resources, and measurement of their usage."""

import os
import resource
import struct
from collections.abc import Mapping
from contextlib import suppress
from itertools import count

from .syscalls import make_call

# Units of the numbers in /proc: pages of memory, and ticks of CPU time.
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = os.sysconf("SC_CLK_TCK")
_proc = -1  # descriptor of a /proc with the processes outside of namespaces, see `open_proc`


def limit_process(limits: Mapping[str, int], tasks: int | None) -> None:
    """Limit the resources of this process and its future children.

    Args:
        limits: numbers by the names of `resource` without RLIMIT_, such as {"NOFILE": 64}.
        tasks: the most processes and threads of this user; None: no limit.
    """
    for name, soft in {**limits, **({} if tasks is None else {"NPROC": tasks})}.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        # CPU seconds: SIGXCPU is sent at the soft limit, SIGKILL at the hard one.
        hard = soft + 1 if name == "CPU" else soft
        _, current_hard = resource.getrlimit(kind)
        if current_hard != resource.RLIM_INFINITY:  # a lower limit of the caller remains: it cannot be raised
            soft, hard = min(soft, current_hard), min(hard, current_hard)
        resource.setrlimit(kind, (soft, hard))


def drop_bounds() -> None:
    """Empty the bounding set of capabilities, irreversibly.

    Root must call it before it changes to another user, which has no right to do it.
    """
    with suppress(OSError):  # there is no capability of this number, or this user has no right to drop it
        for capability in count():
            make_call("prctl", 24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def drop_capabilities() -> None:
    """Drop all capabilities, irreversibly, so that executed files cannot have any either."""
    drop_bounds()
    # capset(2): a header with version 3 and this process, and two structures of three empty sets.
    make_call("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *(0,) * 6))


def open_proc() -> None:
    """Open the current /proc for the other functions of this module, because a new namespace may have no /proc."""
    global _proc
    _proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)


def self_pid() -> int:
    """Return the id of this process in the /proc of `open_proc`, for `list_descendants`."""
    return int(os.readlink("self", dir_fd=_proc))


def _open_file(path: str, flags: int = os.O_RDONLY) -> int:
    return os.open(path, flags, dir_fd=_proc)


def list_descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process, without the process itself."""
    processes = [pid]
    # The list grows while it is iterated over.
    for parent in processes:
        with suppress(OSError):  # it has exited
            tasks = _open_file(f"{parent}/task", os.O_RDONLY | os.O_DIRECTORY)
            try:
                threads = os.listdir(tasks)
            finally:
                os.close(tasks)
            for thread in threads:
                with open(f"{parent}/task/{thread}/children", opener=_open_file) as file:
                    processes.extend(map(int, file.read().split()))
    return processes[1:]


def measure_usage(processes: list[int]) -> tuple[int, float]:
    """Return the resident bytes and the CPU seconds of processes, and of children of this one that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    memory = 0
    seconds = children.ru_utime + children.ru_stime
    for pid in processes:
        try:
            with open(f"{pid}/stat", "rb", opener=_open_file) as file:
                # The fields after the program's name, from the third one on, as numbered in proc(5).
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # it has exited
            continue
        seconds += sum(map(int, fields[11:15])) / _TICK  # utime, stime, cutime, cstime
        memory += int(fields[21]) * _PAGE  # rss
    return memory, seconds


def proportional_memory(processes: list[int]) -> int:
    """Return the bytes that processes use, with shared pages counted once (PSS); slower than `measure_usage`."""
    memory = 0
    for pid in processes:
        # It may have exited.
        with suppress(OSError, StopIteration), open(f"{pid}/smaps_rollup", "rb", opener=_open_file) as file:
            memory += next(int(line.split()[1]) << 10 for line in file if line.startswith(b"Pss:"))
    return memory
