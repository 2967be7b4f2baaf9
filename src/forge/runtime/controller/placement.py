"""Hosts and devices of replicas: which are free, and which each replica has."""

import asyncio
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

from ..inventory import visible_gpus
from . import processes
from .errors import ForgeError
from .hosts import Hosts, LoopbackHosts
from .options import Options
from .replica import Component
from .user_meshes import UserPlacement

ReplicaKey = tuple[str, int]  # a component and an index, or a shared group
MACHINES = "forge.machines"  # entry point of a package that finds other machines: a module like `forge_cluster.attach`


class Waiting(Protocol):
    """A service whose replica is to be placed."""

    def waiting_for_host(self, index: int) -> Any:
        """Return a context within which fanouts exclude a replica."""

    def is_only_replica(self, index: int) -> bool:
        """Return whether no other replica serves."""


class Machines(Protocol):
    """Other machines of a run, as an extension provides them."""

    async def hosts_of(self, component: Component, index: int, service: Waiting) -> Hosts:
        """Return the hosts of a replica, once there is room."""

    async def release(self, name: str, index: int | None) -> None:
        """Release the hosts of a replica, or with None all replicas of a service."""

    async def share(self, store: Any) -> Any:
        """Return a weight store that the processes on all machines can use."""

    def when_leaving(self, call: Any) -> None:
        """Call `call(reason)` once all machines will be taken away."""

    async def close(self) -> None:
        """End the use of the machines."""


def machines_module() -> Any:
    """Return the module that finds other machines. ForgeError: no package provides one."""
    for point in entry_points(group=MACHINES):
        return point.load()
    raise ForgeError("hosts are given, and no installed package knows other machines: pip install torchforge-rl")


class Placement:
    """The hosts and devices of a controller's replicas.

    Attributes:
        machines: the other machines of this run, if it has any.
        hosts: the loopback hosts of each component.
    """

    def __init__(self) -> None:
        self.machines: Machines | None = None
        self.hosts: dict[str, list[LoopbackHosts]] = {}
        self._user = UserPlacement()
        self._free_gpus: list[str] | None = None
        self._gpus: dict[ReplicaKey, list[str]] = {}

    async def attach(self, hosts: str | Sequence[str], wait: float) -> None:
        """Use other machines from now on. ForgeError: none of them can be used; says why."""
        self.machines = await machines_module().attach_hosts(hosts, wait)

    async def hosts_of(self, component: Component, index: int, service: Waiting) -> Hosts:
        """Return the hosts of a replica."""
        options = component.options
        number = index // options.per_process
        if options.mesh is not None and options.mesh.mesh is not None:
            replicas = -(-options.num_replicas // options.per_process)
            gpus = options.gpus_per_proc if options.with_gpus else 0
            return await self._user.place(component.name, number, options.mesh.mesh, options.procs, replicas, gpus)

        if self.machines is not None and (options.host or options.host_count is not None or options.with_gpus):
            return await self.machines.hosts_of(component, index, service)
        if options.host is not None:
            raise ForgeError(
                f"{component.name} is to be on host {options.host}, and there are no hosts: set FORGE_HOSTS"
            )

        if options.host_count is None:
            return Hosts()

        # Several replicas of one process are spread over the hosts; a replica of several has the hosts for itself.
        started = self.hosts.setdefault(component.name, [])
        spread = options.procs == 1
        place = number % options.host_count if spread else index
        while len(started) <= place:
            started.append(LoopbackHosts(f"{component.name}_host{len(started)}", 1 if spread else options.host_count))

        return started[place]

    def gpus_of(self, component: Component, index: int) -> list[str]:
        """Return the devices of a replica: the same ones for each process that replaces another."""
        options = component.options
        if not options.with_gpus:
            return []
        if self._free_gpus is None:
            self._free_gpus = visible_gpus()
        # Shared devices stay with the name of the share: the next component that shares it gets the same devices.
        key, procs = (component.name, index), options.procs
        if options.share is not None:
            key, procs = (f"share {options.share}", 0), options.share_procs
        if key not in self._gpus:
            self._gpus[key] = processes.take_gpus(self._free_gpus, procs * options.gpus_per_proc, component.name)
        return self._gpus[key]

    async def release(self, name: str, index: int | None) -> None:
        """Release the devices and hosts of a replica, or with None all replicas of a service."""
        for key in [key for key in self._gpus if key[0] == name and index in (key[1], None)]:
            assert self._free_gpus is not None
            self._free_gpus += self._gpus.pop(key)
        if self.machines is not None:
            await self.machines.release(name, index)
        self._user.release(name, index)
        if index is None:
            await asyncio.gather(*(hosts.stop() for hosts in self.hosts.pop(name, [])))

    async def close(self) -> None:
        """Stop all hosts, and end the use of other machines."""
        await asyncio.gather(*(hosts.stop() for started in self.hosts.values() for hosts in started))
        if self.machines is not None:
            await self.machines.close()


def procs_of(options: Options) -> int:
    """Return the number of processes of a replica, or of the share that it lives in."""
    return options.share_procs if options.share is not None else options.procs
