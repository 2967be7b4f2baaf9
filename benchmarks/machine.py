"""What happens to a whole machine, done to a tree of processes: memory runs out, it is suspended, its clock jumps."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
CLOCK = "FORGE_CLOCK"  # environment variable: the file with the offset of the clock, in seconds
# What LD_PRELOAD puts in the place of the clock's functions. Clocks that only run forward stay as they are.
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile long *offset;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FORGE_CLOCK");
    int file = path ? open(path, O_RDONLY) : -1;
    void *page = file < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) offset = page;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (now) *now = precise.tv_sec;
    return precise.tv_sec;
}
"""


def memory_limit(pids: Iterable[int], limit: int) -> Path:
    """Put processes into a cgroup of so many bytes, beyond which the kernel kills; returns the cgroup.

    Raises:
        OSError: cgroups are not available here.
    """
    old = CGROUPS / "memory"
    group = (old if old.is_dir() else CGROUPS) / f"forge-chaos-{os.getpid()}"
    group.mkdir(exist_ok=True)
    (group / ("memory.limit_in_bytes" if old.is_dir() else "memory.max")).write_text(str(limit))
    for pid in pids:
        (group / "cgroup.procs").write_text(str(pid))
    return group


def suspend(pids: Iterable[int], seconds: float) -> None:
    """Freeze processes, this one among them, as a machine that is suspended does; returns once they run again.

    Raises:
        OSError: cgroups are not available here.
    """
    old = CGROUPS / "freezer"
    group = (old if old.is_dir() else CGROUPS) / f"forge-frozen-{os.getpid()}"
    group.mkdir()
    state, on, off = ("freezer.state", "FROZEN", "THAWED") if old.is_dir() else ("cgroup.freeze", "1", "0")
    for pid in pids:
        (group / "cgroup.procs").write_text(str(pid))
    away = (old if old.is_dir() else CGROUPS) / "cgroup.procs"
    steps = f"echo {on} > {group}/{state}; sleep {seconds}; echo {off} > {group}/{state}"
    leave = f"for p in $(cat {group}/cgroup.procs); do echo $p > {away}; done; rmdir {group}"
    # In a process outside of the group: this one is frozen with the others.
    subprocess.run(["sh", "-c", f"echo $$ > {away}; {steps}; {leave}"], check=True)


class Clock:
    """The clock of this process and all that it starts; `Clock.install` restarts the program with it."""

    def __init__(self) -> None:
        with open(os.environ[CLOCK], "r+b") as file:
            self._offset = mmap.mmap(file.fileno(), 8)

    def set(self, offset: int) -> None:
        """Seconds that it is ahead of the machine's."""
        self._offset[:8] = struct.pack("=q", offset)

    @staticmethod
    def install() -> str | None:
        """Restart this program with a clock that can be set. Returns why that is not possible, or None once it is."""
        if CLOCK in os.environ:
            return None
        if (compiler := shutil.which("cc")) is None:
            return "there is no C compiler"
        folder = Path(tempfile.mkdtemp(prefix="forge-clock-"))
        (folder / "shim.c").write_text(SHIM)
        (folder / "offset").write_bytes(bytes(8))
        words = [compiler, "-shared", "-fPIC", "-O2", "-o", str(folder / "shim.so"), str(folder / "shim.c"), "-ldl"]
        subprocess.run(words, check=True)
        env = os.environ | {"LD_PRELOAD": str(folder / "shim.so"), CLOCK: str(folder / "offset")}
        os.execve(sys.executable, [sys.executable, *sys.argv], env)


def descendants(root: int) -> list[int]:
    """A process and all that it has started."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found
