"""Inventory of a machine, as daemons describe theirs."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.runtime.inventory import free_shared_memory, memory_limit, package_versions

# One entry for each RDMA device.
INFINIBAND = Path("/sys/class/infiniband")
COUNT_TIMEOUT = 120.0  # seconds


@dataclass(frozen=True)
class Inventory:
    """The resources of one machine. Memory in bytes.

    gpus: names of the accelerators, as in the variables VISIBLE.
    clock: its time when this was created, in seconds since the epoch.
    open_files, locked_memory: the limits of a process; RDMA locks memory.
    infiniband: its RDMA devices.
    """

    name: str
    gpus: tuple[str, ...]
    cores: int
    memory: int
    shared_memory: int
    clock: float
    versions: dict[str, str] = field(default_factory=dict)
    open_files: int = 0
    locked_memory: int = 0
    infiniband: tuple[str, ...] = ()

    @classmethod
    def of_this_machine(cls, gpus: tuple[str, ...]) -> Inventory:
        """Read everything but the accelerators now."""
        return cls(
            socket.gethostname(),
            gpus,
            len(os.sched_getaffinity(0)),
            memory_limit(),
            free_shared_memory(),
            time.time(),
            package_versions(),
            resource.getrlimit(resource.RLIMIT_NOFILE)[1],
            resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
            tuple(sorted(os.listdir(INFINIBAND))) if INFINIBAND.is_dir() else (),
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Inventory:
        """Return the inventory of plain data, as it came over the wire."""
        lists = {name: tuple(values[name]) for name in ("gpus", "infiniband")}
        return cls(**{**values, **lists})

    def __str__(self) -> str:
        gpus = f"{len(self.gpus)} GPUs, " if self.gpus else "no GPU, "
        return f"{gpus}{self.cores} cores, {self.memory / 1e9:.0f} GB, /dev/shm {self.shared_memory / 1e9:.1f} GB free"


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
