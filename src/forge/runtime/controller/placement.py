"""Hosts and devices of replicas: which are free, and which each replica has."""

from __future__ import annotations

import asyncio

from ..cluster.inventory import visible_gpus
from ..cluster.pool import Pool
from ..cluster.rooms import Demand, NoHostRoom
from . import processes
from .errors import ForgeError, Unrecoverable
from .hosts import Hosts, LoopbackHosts, PooledHosts
from .options import Options
from .replica import Component
from .service import Service
from .user_meshes import UserPlacement

ReplicaKey = tuple[str, int]  # a component and an index, or a shared group


class Placement:
    """The hosts and devices of a controller's replicas.

    Attributes:
        pool: the other machines of this run, if it has any.
        hosts: the loopback hosts of each component.
    """

    def __init__(self) -> None:
        self.pool: Pool | None = None
        self.hosts: dict[str, list[LoopbackHosts]] = {}
        self._user = UserPlacement()
        self._pooled: dict[ReplicaKey, PooledHosts] = {}
        self._free_gpus: list[str] | None = None
        self._gpus: dict[ReplicaKey, list[str]] = {}

    async def hosts_of(self, component: Component, index: int, service: Service) -> Hosts:
        """Return the hosts of a replica; those of the pool once it has room."""
        options = component.options
        if options.mesh is not None and options.mesh.mesh is not None:
            replicas = -(-options.num_replicas // options.per_process)
            gpus_per_proc = options.gpus_per_proc if options.with_gpus else 0
            number = index // options.per_process
            return await self._user.place(
                component.name, number, options.mesh.mesh, options.procs, replicas, gpus_per_proc
            )
        if options.host is not None and self.pool is None:
            raise ForgeError(
                f"{component.name} is to be on host {options.host}, and there are no hosts: set FORGE_HOSTS"
            )
        if self.pool is not None and (options.host or options.host_count is not None or options.with_gpus):
            return await self._pooled_hosts(self.pool, component, index, service)
        if options.host_count is None:
            return Hosts()
        # Several replicas of one process are spread over the hosts; a replica of several has the hosts for itself.
        started = self.hosts.setdefault(component.name, [])
        spread = options.procs == 1
        number = index // options.per_process % options.host_count if spread else index
        while len(started) <= number:
            started.append(LoopbackHosts(f"{component.name}_host{len(started)}", 1 if spread else options.host_count))
        return started[number]

    async def _pooled_hosts(self, pool: Pool, component: Component, index: int, service: Service) -> PooledHosts:
        options = component.options
        key = component.name, index // options.per_process
        kind = component.name
        # Processes that several components share are placed once, under the name of the share.
        if options.share is not None:
            key = f"share {options.share}", 0
            kind = ""
        max_hosts = options.host_count if options.procs == 1 else None
        demand = demand_of(f"{component.name}[{index}]", options)
        with service.waiting_for_host(index):
            try:
                if key in self._pooled and self._pooled[key].allocation.lost:
                    await self._pooled.pop(key).stop()  # on the hosts that still live

                # A run without its last replica of a vital component makes no progress: then the wait has a limit.
                def limited() -> bool:
                    return component.cls.vital and service.is_only_replica(index)

                allocation = await pool.allocate(key, demand, limited, kind, max_hosts)
            except NoHostRoom as error:
                raise Unrecoverable(str(error)) from error
        if key not in self._pooled or self._pooled[key].allocation is not allocation:
            self._pooled[key] = PooledHosts(f"{component.name}{index}", allocation)
        return self._pooled[key]

    def gpus_of(self, component: Component, index: int) -> list[str]:
        """Return the devices of a replica: the same ones for each process that replaces another."""
        if not component.options.with_gpus:
            return []
        if self._free_gpus is None:
            self._free_gpus = visible_gpus()
        options = component.options
        key = component.name, index
        procs = options.procs
        # Shared devices stay with the name of the share: the next component that shares it gets the same devices.
        if options.share is not None:
            key = f"share {options.share}", 0
            procs = options.share_procs
        if key not in self._gpus:
            self._gpus[key] = processes.take_gpus(self._free_gpus, procs * options.gpus_per_proc, component.name)
        return self._gpus[key]

    async def release(self, name: str, index: int | None) -> None:
        """Release the devices and hosts of a replica, or with None those of all replicas of a service."""
        for key in [key for key in self._gpus if key[0] == name and index in (key[1], None)]:
            assert self._free_gpus is not None
            self._free_gpus += self._gpus.pop(key)
        for key in [key for key in self._pooled if key[0] == name and index in (key[1], None)]:
            assert self.pool is not None
            await self._pooled.pop(key).stop()
            self.pool.release(key)
        await self._user.release(name, index)
        if index is None:
            await asyncio.gather(*(hosts.stop() for hosts in self.hosts.pop(name, [])))

    async def close(self) -> None:
        """Stop all hosts, and end the leases of the pool."""
        await asyncio.gather(*(hosts.stop() for started in self.hosts.values() for hosts in started))
        await self._user.close()
        if self.pool is not None:
            await self.pool.close()


def demand_of(owner: str, options: Options) -> Demand:
    """Return the demand on a pool's hosts of one replica with these options."""
    return Demand(
        owner,
        options.share_procs if options.share is not None else options.procs,
        options.gpus_per_proc if options.with_gpus else 0,
        options.host_count if options.procs > 1 else None,
        int((options.memory_gb or 0) * 1e9),
        options.threads,
        options.host,
    )
