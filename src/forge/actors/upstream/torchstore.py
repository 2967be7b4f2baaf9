"""`torchstore.utils`: what TorchStore's examples and tests use beside its functions."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from torch import Tensor

from ...runtime.controller._monarch import Actor, ProcMesh, this_host
from ...system.boxes import Box, full_box

__all__ = ["get_local_hostname", "get_local_tensor", "spawn_actors"]


async def spawn_actors(
    num_processes: int, actor_cls: type[Actor], name: str, mesh: ProcMesh | None = None, **init_args: Any
) -> Any:
    """Spawn an actor of Monarch's in new processes of this host, or in those of a mesh; returns its actor mesh."""
    processes = this_host().spawn_procs(per_host={"gpus": num_processes}) if mesh is None else mesh
    # An error of the start is raised here, not by the first call.
    await processes.initialized
    return processes.spawn(f"{name}_{uuid4().hex[:8]}", actor_cls, **init_args)


def get_local_hostname() -> str:
    """The name of this host: HOSTNAME if it is set."""
    return os.environ.get("HOSTNAME", socket.gethostname())


def get_local_tensor(global_tensor: Tensor, local_shape: Sequence[int], global_offset: Sequence[int]) -> Tensor:
    """The block of a tensor at an offset, as a view."""
    block = Box(tuple(global_offset), tuple(local_shape))
    return global_tensor[block.within(full_box(global_tensor.shape))]
