"""Inventory of a machine, as daemons describe theirs."""

import json
import os
import resource
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from forge.runtime.inventory import free_shared_memory, memory_limit, package_versions

INFINIBAND = Path("/sys/class/infiniband")  # has an entry for each RDMA device


@dataclass(frozen=True)
class Inventory:
    """The resources of one machine; memory is in bytes.

    gpus: names of the accelerators, as in CUDA_VISIBLE_DEVICES.
    clock: time of its clock when this was created, in seconds since 1970.
    versions: of Python and packages, by name.
    open_files: number of files that a process may open.
    locked_memory: memory that a process may lock, as RDMA does; negative for no limit.
    infiniband: names of its RDMA devices.
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
    def of_this_machine(cls, gpus: tuple[str, ...]) -> Self:
        """Return the resources of this machine, with the given accelerators."""
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
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the inventory whose fields were sent as JSON, along with others."""
        lists = {name: tuple(values[name]) for name in ("gpus", "infiniband")}
        return cls(**{field.name: (values | lists)[field.name] for field in fields(cls)})

    def __str__(self) -> str:
        gpus = f"{len(self.gpus)} GPUs, " if self.gpus else "no GPU, "
        return f"{gpus}{self.cores} cores, {self.memory / 1e9:.0f} GB, /dev/shm {self.shared_memory / 1e9:.1f} GB free"


def count_gpus() -> tuple[str, ...]:
    """Return the names of the visible GPUs, without importing torch or opening a GPU in this process.

    Raises:
        RuntimeError: torch could not count them, in a separate process.
    """
    program = "import json; from forge.runtime.inventory import visible_gpus; print(json.dumps(visible_gpus()))"
    # 120 s: the process imports torch.
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    if process.returncode:
        raise RuntimeError(f"the GPUs of this machine could not be counted: {process.stderr.strip()[-500:]}")
    return tuple(json.loads(process.stdout.splitlines()[-1]))
