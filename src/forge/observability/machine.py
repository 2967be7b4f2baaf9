"""Resources of the machine that a run uses: CPU and memory of a process, free disk, GPUs."""

import importlib.util
import os
import shutil
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


class Usage(NamedTuple):
    """CPU-seconds and average cores of a process since the last call, and its resident bytes now."""

    process: str
    pid: int
    time: float
    cpu_seconds: float
    cores: float
    memory: int


_last = (time.time(), time.process_time())


def measure_usage(process: str) -> Usage:
    """Measure this process, without its children."""
    global _last
    now = time.time()
    cpu = time.process_time()
    before, spent = _last
    _last = now, cpu
    if cpu < spent:  # the clock of a fork starts at zero
        spent = 0.0
    try:
        memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:  # not Linux
        memory = 0
    return Usage(process, os.getpid(), now, cpu - spent, (cpu - spent) / max(now - before, 1e-3), memory)


def measure_room(folder: Path) -> dict[str, float]:
    """Return the free disk of a folder and the available memory of this machine, in GB."""
    free = {"machine/disk_free_gb": shutil.disk_usage(folder).free / 1e9}
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free["machine/memory_free_gb"] = int(lines["MemAvailable"].split()[0]) * 1024 / 1e9
    except (FileNotFoundError, KeyError):  # not Linux
        pass
    return free


@cache
def open_nvml() -> Any:
    """Return NVIDIA's library with its devices opened; None without it (`pip install nvidia-ml-py`) or its driver."""
    if importlib.util.find_spec("pynvml") is None:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        return None
    return pynvml


def measure_gpus() -> dict[str, float]:
    """Return memory in use and utilisation of each GPU of this machine. Untested: needs an NVIDIA driver."""
    metrics: dict[str, float] = {}
    library = open_nvml()
    if library is not None:
        for index in range(library.nvmlDeviceGetCount()):
            device = library.nvmlDeviceGetHandleByIndex(index)
            metrics[f"gpu/{index}/memory_gb"] = library.nvmlDeviceGetMemoryInfo(device).used / 1e9
            metrics[f"gpu/{index}/utilisation"] = library.nvmlDeviceGetUtilizationRates(device).gpu / 100
    return metrics


def gpu_name() -> str | None:
    """Return name of the first GPU of this machine."""
    library = open_nvml()
    if library is None or not library.nvmlDeviceGetCount():
        return None
    name = library.nvmlDeviceGetName(library.nvmlDeviceGetHandleByIndex(0))
    return name if isinstance(name, str) else name.decode()
