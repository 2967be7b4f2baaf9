"""Resources of the machine that a run uses: CPU and memory of a process, free disk, GPUs."""

import importlib.util
import os
import shutil
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


class Usage(NamedTuple):
    """CPU time and memory that a process used since its last measurement.

    process, pid: its name and number.
    time: of the measurement, in seconds since the epoch.
    cpu_seconds, cores: since the last measurement, in total and on average.
    memory: resident bytes now.
    """

    process: str
    pid: int
    time: float
    cpu_seconds: float
    cores: float
    memory: int


_last = (time.time(), time.process_time())


def measure_usage(process: str) -> Usage:
    """Return the usage of this process, without its children, since the last call; `process` is its name."""
    global _last
    now, cpu = time.time(), time.process_time()
    before, spent = _last
    _last = now, cpu
    if cpu < spent:  # this process was forked since then, so its CPU clock started again at 0
        spent = 0.0
    memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Usage(process, os.getpid(), now, cpu - spent, (cpu - spent) / max(now - before, 1e-3), memory)


def measure_room(folder: Path) -> dict[str, float]:
    """Return metrics of the free disk space at a directory and of this machine's available memory, in GB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return {
        "machine/disk_free_gb": shutil.disk_usage(folder).free / 1e9,
        "machine/memory_free_gb": int(lines["MemAvailable"].split()[0]) * 1024 / 1e9,
    }


@cache
def open_nvml() -> Any:
    """Return NVIDIA's initialised library pynvml; None if it is not installed (`pip install nvidia-ml-py`), or there is
    no driver."""
    if importlib.util.find_spec("pynvml") is None:
        return None

    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        return None
    return pynvml


def measure_gpus() -> dict[str, float]:
    """Return the metrics of each GPU of this machine: `gpu/N/memory_gb` in use, and `gpu/N/utilisation` from 0 to 1.
    Empty without a driver; with one it is untested."""
    metrics: dict[str, float] = {}
    if (library := open_nvml()) is not None:
        for index in range(library.nvmlDeviceGetCount()):
            device = library.nvmlDeviceGetHandleByIndex(index)
            metrics[f"gpu/{index}/memory_gb"] = library.nvmlDeviceGetMemoryInfo(device).used / 1e9
            metrics[f"gpu/{index}/utilisation"] = library.nvmlDeviceGetUtilizationRates(device).gpu / 100
    return metrics


def gpu_name() -> str | None:
    """Return the name of this machine's first GPU, such as "NVIDIA H100 80GB HBM3"; None without one."""
    library = open_nvml()
    if library is None or not library.nvmlDeviceGetCount():
        return None
    name = library.nvmlDeviceGetName(library.nvmlDeviceGetHandleByIndex(0))
    return name if isinstance(name, str) else name.decode()
