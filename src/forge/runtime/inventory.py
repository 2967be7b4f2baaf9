"""Inventory of a machine: accelerators, cores, memory, shared memory, versions of the packages that a run needs."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import Any

# Which accelerators a process may see: CUDA and ROCm read the first, oneAPI the second.
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
# Processes of a run must agree on these.
PACKAGES = ("torchforge-rl", "torch", "torchmonarch", "transformers")
# One entry for each RDMA device.
INFINIBAND = Path("/sys/class/infiniband")
COUNT_TIMEOUT = 120.0  # seconds
# Bytes free, and files of a process, below which a run is in danger: shared memory holds versions of the weights, and
# each replica has several connections.
SHARED_MEMORY = 2e9
OPEN_FILES = 1024


@dataclass(frozen=True)
class Inventory:
    """The resources of one machine. Memory in bytes.

    gpus: names of the accelerators, as in the variables VISIBLE.
    boot: changes with every start of the machine.
    clock: its time when this was created, in seconds since the epoch.
    open_files, locked_memory: the limits of a process; RDMA locks memory.
    infiniband: its RDMA devices.
    """

    name: str
    gpus: tuple[str, ...]
    cores: int
    memory: int
    shared_memory: int
    boot: str
    clock: float
    versions: dict[str, str] = field(default_factory=dict)
    open_files: int = 0
    locked_memory: int = 0
    infiniband: tuple[str, ...] = ()

    @classmethod
    def of_this_machine(cls, gpus: tuple[str, ...]) -> Inventory:
        """Read everything but the accelerators now."""
        shm = Path("/dev/shm")
        versions = {"python": platform.python_version()}
        # Versions are compared with those of the controller: pickled objects must fit.
        for package in PACKAGES:
            try:
                versions[package] = version(package)
            except PackageNotFoundError:
                versions[package] = "none"
        return cls(
            socket.gethostname(),
            gpus,
            len(os.sched_getaffinity(0)),
            memory_limit(),
            shutil.disk_usage(shm).free if shm.is_dir() else 0,
            boot_id(),
            time.time(),
            versions,
            resource.getrlimit(resource.RLIMIT_NOFILE)[1],
            resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
            tuple(sorted(os.listdir(INFINIBAND))) if INFINIBAND.is_dir() else (),
        )

    def to_dict(self) -> dict[str, object]:
        """Return plain data, for the wire."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Inventory:
        """Invert `to_dict`."""
        lists = {name: tuple(values[name]) for name in ("gpus", "infiniband")}
        return cls(**{**values, **lists})

    def __str__(self) -> str:
        gpus = f"{len(self.gpus)} GPUs, " if self.gpus else "no GPU, "
        return f"{gpus}{self.cores} cores, {self.memory / 1e9:.0f} GB, /dev/shm {self.shared_memory / 1e9:.1f} GB free"


def boot_id() -> str:
    """Return an id of this machine that changes with every start."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def memory_limit() -> int:
    """Bytes of memory of this machine, or of the control group of this process."""
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


def count_gpus() -> tuple[str, ...]:
    """Return the same as `visible_gpus`, without importing torch or opening an accelerator in this process.

    Raises:
        RuntimeError: torch could not count them.
    """
    program = "import json; from forge.runtime.inventory import visible_gpus; print(json.dumps(visible_gpus()))"
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=COUNT_TIMEOUT, check=False
    )
    if process.returncode:
        raise RuntimeError(f"the GPUs of this machine could not be counted: {process.stderr.strip()[-500:]}")
    return tuple(json.loads(process.stdout.splitlines()[-1]))
