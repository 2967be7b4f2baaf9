"""What this machine has: accelerators, memory, and the versions of packages that a run needs."""

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path

# Environment variables that list the accelerators a process may see: CUDA and ROCm read the first, oneAPI the second.
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
# Packages that must have the same version in all processes of a run.
PACKAGES = ("torchforge-rl", "torch", "torchmonarch", "transformers")
# Minima below which a run is in danger.
SHARED_MEMORY = 2e9  # free bytes: versions of the weights are in shared memory
OPEN_FILES = 1024  # of a process: each replica has several connections


def package_versions() -> dict[str, str]:
    """Return the versions of Python and PACKAGES by name, "none" for one that is not installed."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "none"
    return versions


def free_shared_memory() -> int:
    """Return the free bytes of /dev/shm; 0 if it does not exist."""
    shm = Path("/dev/shm")
    return shutil.disk_usage(shm).free if shm.is_dir() else 0


def memory_limit() -> int:
    """Return the bytes of memory that this process can use: the machine's, or a lower limit of its control group."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limits.append(int((Path("/sys/fs/cgroup") / name).read_text()))
        except (OSError, ValueError):  # a file of the other version of control groups, or "max" for no limit
            continue
    return min(limits)


def visible_gpus() -> list[str]:
    """Return the names of the accelerators that this process may use, e.g. ["0", "1"].

    They are those in the first variable of VISIBLE that is set: numbers, UUIDs, or names of parts of a GPU (MIG). If
    none is set, all accelerators that torch finds are numbered from 0.
    """
    if setting := next(filter(None, map(os.environ.get, VISIBLE)), None):
        names = [name.strip() for name in setting.split(",")]
        # As CUDA does: -1 hides all later ones.
        return list(takewhile(lambda name: name and not name.startswith("-"), names))
    import torch

    return [str(index) for index in range(torch.accelerator.device_count())]
