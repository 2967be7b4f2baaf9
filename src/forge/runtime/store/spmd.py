"""The store of ranks that torchrun started, without a controller: `await ts.initialize_spmd()` in each of them."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from . import default
from .calls import DEFAULT_NAME
from .calls import initialize as initialize_here
from .strategies import TorchStoreStrategy
from .versions import VersionStore

RENDEZVOUS = "forge/store/address"
TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class SPMDEnv:
    """The place of this process among the ranks of a job, as torchrun's environment variables say."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int

    @property
    def num_hosts(self) -> int:
        """Hosts of the job."""
        return self.world_size // self.local_world_size

    @property
    def group_rank(self) -> int:
        """The number of this rank's host."""
        return self.rank // self.local_world_size

    def __post_init__(self) -> None:
        if self.world_size % self.local_world_size:
            raise ValueError(
                f"world_size ({self.world_size}) must be divisible by local_world_size ({self.local_world_size})"
            )

    @classmethod
    def from_env(cls, *, master_addr: str | None = None, master_port: int | None = None) -> SPMDEnv:
        """Read RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

        Raises:
            RuntimeError: one is not set; names it.
        """
        return cls(
            rank=int(_variable("RANK")),
            local_rank=int(_variable("LOCAL_RANK")),
            world_size=int(_variable("WORLD_SIZE")),
            local_world_size=int(_variable("LOCAL_WORLD_SIZE")),
            master_addr=_variable("MASTER_ADDR", master_addr),
            master_port=int(_variable("MASTER_PORT", None if master_port is None else str(master_port))),
        )


async def initialize(
    strategy: TorchStoreStrategy | None = None,
    store_name: str = DEFAULT_NAME,
    *,
    env: SPMDEnv | None = None,
    rendezvous_timeout: timedelta = TIMEOUT,
) -> None:
    """Share the store of rank 0 with all ranks; each must call it. `shutdown` in rank 0 removes it.

    The ranks meet in the default process group, or at MASTER_ADDR and MASTER_PORT if there is none.

    Args:
        strategy, store_name: as of `forge.store.initialize`.
        env: the place of this rank; None reads the environment.
        rendezvous_timeout: how long to wait for rank 0 where there is no process group, which has its own.

    Raises:
        RuntimeError: an environment variable is not set, or rank 0 is on another host.
    """
    ranks = SPMDEnv.from_env() if env is None else env
    if ranks.num_hosts > 1:
        raise RuntimeError(
            f"initialize_spmd shares the memory of one host, and the job has {ranks.num_hosts}: run it on one, or "
            "start it with forge launch, where hosts transfer weights"
        )
    # Before the others ask for its address.
    if ranks.rank == 0:
        await initialize_here(strategy=strategy, store_name=store_name)
    address = await asyncio.to_thread(_exchange, ranks, rendezvous_timeout)
    # MASTER_ADDR may be reachable where rank 0's memory is not.
    if ranks.rank:
        store = VersionStore(address)
        if not store.is_local():
            raise RuntimeError(f"rank 0's store {address} is not on the host of rank {ranks.rank}")
        default.use(store)


def _exchange(ranks: SPMDEnv, timeout: timedelta) -> Path:
    """The folder of rank 0's store, in every rank."""
    address = str(default.default_store().root) if ranks.rank == 0 else ""
    if dist.is_initialized():
        addresses = [address]
        dist.broadcast_object_list(addresses, src=0)
        return Path(addresses[0])
    # torchrun's agent holds the port already; without it rank 0 does.
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    meeting = dist.TCPStore(
        ranks.master_addr,
        ranks.master_port,
        ranks.world_size,
        is_master=ranks.rank == 0 and not is_agents,
        timeout=timeout,
        multi_tenant=True,
    )
    if ranks.rank == 0:
        meeting.set(RENDEZVOUS, address)
    address = meeting.get(RENDEZVOUS).decode()
    # Rank 0's port must stay until all have read.
    meeting.add(f"{RENDEZVOUS}/read", 1)
    if ranks.rank == 0:
        _wait_for_all(meeting, ranks.world_size, timeout)
    return Path(address)


def _wait_for_all(meeting: dist.TCPStore, world_size: int, timeout: timedelta) -> None:
    """Wait until every rank has read the address. RuntimeError: some have not, after `timeout`."""
    deadline = time.monotonic() + timeout.total_seconds()
    while (count := meeting.add(f"{RENDEZVOUS}/read", 0)) < world_size:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{count} of {world_size} ranks called initialize_spmd within {timeout}")
        time.sleep(0.01)


def _variable(name: str, default_value: str | None = None) -> str:
    value = os.environ.get(name, default_value)
    if value is None:
        raise RuntimeError(f"initialize_spmd needs the environment variable {name}: start the ranks with torchrun")
    return value
