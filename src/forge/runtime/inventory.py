"""What this machine has: accelerators, memory, and versions of the packages that a run needs."""

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path

# Which accelerators a process may see: CUDA and ROCm read the first, oneAPI the second.
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
# Processes of a run must agree on these.
PACKAGES = ("torchforge-rl", "torch", "torchmonarch", "transformers")
# Bytes free, and files of a process, below which a run is in danger: shared memory holds versions of the weights, and
# each replica has several connections.
SHARED_MEMORY = 2e9
OPEN_FILES = 1024


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of PACKAGES."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def free_shared_memory() -> int:
    """Return bytes free in /dev/shm; 0 if there is none."""
    shm = Path("/dev/shm")
    return shutil.disk_usage(shm).free if shm.is_dir() else 0


def memory_limit() -> int:
    """Return bytes of memory of this machine, or of the control group of this process."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limits.append(int((Path("/sys/fs/cgroup") / name).read_text()))
        except (OSError, ValueError):  # the other version of control groups, or "max"
            continue
    return min(limits)


def visible_gpus() -> list[str]:
    """Return the accelerators that this process may use, as the first variable of VISIBLE that is set names them: by
    number, UUID, or the name of a part of a GPU (MIG)."""
    setting = next(filter(None, map(os.environ.get, VISIBLE)), None)
    if setting:
        names = [name.strip() for name in setting.split(",")]
        # As CUDA does: -1 hides all later ones.
        return list(takewhile(lambda name: name and not name.startswith("-"), names))
    import torch

    return [str(index) for index in range(torch.accelerator.device_count())]
