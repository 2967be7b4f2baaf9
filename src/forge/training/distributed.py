"""The process group and device of one training rank."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# A rank that waits longer than this in a collective has lost a peer; the error names the collective.
COLLECTIVE_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank's place: `mesh` is None for a single process."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh | None

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place."""
        if self.mesh is not None:
            dist.all_reduce(values)
        return values


def join(rank: int = 0, world_size: int = 1, rendezvous: str | None = None, shard_degree: int = -1) -> Ranks:
    """Join the group of `world_size` ranks and lay out its data-parallel mesh.

    Args:
        rendezvous: `host:port` of a TCPStore held by rank 0; not needed for one process.
        shard_degree: ranks that share one copy of the parameters; -1 means all of them. Less than `world_size` gives
            HSDP: copies of the shards, reduced across.

    Raises:
        ValueError: `shard_degree` does not divide `world_size`, or several ranks without a rendezvous.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    shard_degree = world_size if shard_degree == -1 else shard_degree
    if shard_degree < 1 or world_size % shard_degree:
        raise ValueError(
            f"parallelism.data_parallel_shard_degree = {shard_degree} does not divide the trainer's {world_size} ranks"
        )
    if world_size == 1:
        return Ranks(0, 1, device, None)
    if rendezvous is None:
        raise ValueError(f"{world_size} ranks need a rendezvous address")
    host, port = rendezvous.rsplit(":", 1)
    store = dist.TCPStore(host, int(port), world_size, is_master=False, timeout=COLLECTIVE_TIMEOUT)
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
    )
    copies = world_size // shard_degree
    shape, names = ((world_size,), ("shard",)) if copies == 1 else ((copies, shard_degree), ("replicate", "shard"))
    return Ranks(rank, world_size, device, init_device_mesh(device.type, shape, mesh_dim_names=names))


def leave() -> None:
    """Leave the process group, if any."""
    if dist.is_initialized():
        dist.destroy_process_group()
