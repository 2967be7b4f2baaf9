"""What a run uses of its machine: CPU and memory of a process, room on the disk, GPUs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


class Usage(NamedTuple):
    """What a process used since the last look at it: CPU-seconds, cores on average; and its resident bytes now."""

    process: str
    pid: int
    time: float
    cpu_seconds: float
    cores: float
    memory: int


_last = (time.time(), time.process_time())


def usage(process: str) -> Usage:
    """Of this process, without its children."""
    global _last
    now, cpu = time.time(), time.process_time()
    (before, spent), _last = _last, (now, cpu)
    if cpu < spent:  # a fork has its own clock
        spent = 0.0
    try:
        memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:  # not Linux
        memory = 0
    return Usage(process, os.getpid(), now, cpu - spent, (cpu - spent) / max(now - before, 1e-3), memory)


def room(folder: Path) -> dict[str, float]:
    """Free disk of a folder and available memory of this machine, in GB."""
    found = {"machine/disk_free_gb": shutil.disk_usage(folder).free / 1e9}
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found["machine/memory_free_gb"] = int(lines["MemAvailable"].split()[0]) * 1024 / 1e9
    except (FileNotFoundError, KeyError):  # not Linux
        pass
    return found


@cache
def nvml() -> Any:
    """NVIDIA's library with its devices opened; None where it is not (`pip install nvidia-ml-py`)."""
    if importlib.util.find_spec("pynvml") is None:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        return None
    return pynvml


def gpus() -> dict[str, float]:
    """Memory in use and utilisation of each GPU of this machine. Untested: needs an NVIDIA driver."""
    found: dict[str, float] = {}
    if (library := nvml()) is not None:
        for index in range(library.nvmlDeviceGetCount()):
            device = library.nvmlDeviceGetHandleByIndex(index)
            found[f"gpu/{index}/memory_gb"] = library.nvmlDeviceGetMemoryInfo(device).used / 1e9
            found[f"gpu/{index}/utilisation"] = library.nvmlDeviceGetUtilizationRates(device).gpu / 100
    return found


def gpu_name() -> str | None:
    """Of the first GPU of this machine."""
    library = nvml()
    if library is None or not library.nvmlDeviceGetCount():
        return None
    name = library.nvmlDeviceGetName(library.nvmlDeviceGetHandleByIndex(0))
    return name if isinstance(name, str) else name.decode()
