"""Inventory of a machine, as daemons describe theirs."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field, fields
from typing import Any, Self

from forge.runtime.inventory import free_shared_memory, memory_limit, package_versions


@dataclass(frozen=True)
class Inventory:
    """The resources of one machine; memory is in bytes.

    gpus: names of the accelerators, as in CUDA_VISIBLE_DEVICES.
    versions: of Python and packages, by name.
    """

    name: str
    gpus: tuple[str, ...]
    cores: int
    memory: int
    shared_memory: int
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_this_machine(cls, gpus: tuple[str, ...]) -> Self:
        """Return the resources of this machine, with the given accelerators."""
        return cls(
            socket.gethostname(),
            gpus,
            len(os.sched_getaffinity(0)),
            memory_limit(),
            free_shared_memory(),
            package_versions(),
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the inventory whose fields were sent as JSON, along with others."""
        known_values = {field.name: values[field.name] for field in fields(cls)}
        return cls(**known_values | {"gpus": tuple(values["gpus"])})

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
