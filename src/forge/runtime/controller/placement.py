"""The hosts and devices of replicas: assigns them to new replicas, and keeps track of the free ones."""

import asyncio
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

from ..inventory import visible_gpus
from .errors import ForgeError
from .hosts import Hosts, LoopbackHosts
from .options import Options
from .replica import Component
from .user_meshes import ReplicaKey, UserPlacement

MACHINES = "forge.machines"  # group of entry points: modules that find other machines, such as `forge_cluster.attach`


class Waiting(Protocol):
    """Protocol of a service with a replica `index` that has to be placed and may wait for a host."""

    def waiting_for_host(self, index: int) -> Any:
        """Return a context manager: within its block, fanouts do not wait for this replica."""

    def is_only_replica(self, index: int) -> bool:
        """Return whether no other replica of the service serves."""


class Machines(Protocol):
    """Other machines of a run, as an extension provides them."""

    async def hosts_of(self, component: Component, index: int, service: Waiting) -> Hosts:
        """Return the hosts of replica `index` of a component; waits until enough of them are free."""

    async def release(self, name: str, index: int | None) -> None:
        """Release the hosts of replica `index` of the service `name`; None stands for all of its replicas."""

    async def share(self, store: Any) -> Any:
        """Return a weight store that the processes on all machines can use, made from the controller's own store."""

    def when_leaving(self, call: Any) -> None:
        """Register `call(reason)` for the moment when it becomes known that all machines will be taken away."""

    async def close(self) -> None:
        """Disconnect from the machines, and end there what this run has started."""


def machines_module() -> Any:
    """Return the module that finds other machines, from the entry points of the group MACHINES.

    Raises:
        ForgeError: no installed package provides one.
    """
    for point in entry_points(group=MACHINES):
        return point.load()
    raise ForgeError("hosts are set, but no installed package supports several machines: pip install torchforge-rl")


class Placement:
    """The hosts and devices of a controller's replicas.

    Attributes:
        machines: the other machines of this run, if it has any.
        hosts: the loopback hosts of each component, by its name.
    """

    def __init__(self) -> None:
        self.machines: Machines | None = None
        self.hosts: dict[str, list[LoopbackHosts]] = {}
        self._user = UserPlacement()
        self._free_gpus: list[str] | None = None
        self._gpus: dict[ReplicaKey, list[str]] = {}  # also by the name of a share, with the index 0

    async def attach(self, hosts: str | Sequence[str], wait: float) -> None:
        """Use other machines for the replicas that are placed from now on.

        Args:
            hosts: HOST:PORT of the machines, or the path of a file of them.
            wait: seconds that a service without any replica waits for a machine.

        Raises:
            ForgeError: none of the machines can be used; says why.
        """
        self.machines = await machines_module().attach_hosts(hosts, wait)

    async def hosts_of(self, component: Component, index: int, service: Waiting) -> Hosts:
        """Return the hosts that replica `index` of a component is started on, as the component's options say.

        They are a user's mesh, other machines, loopback hosts, or the controller's own host.

        Raises:
            ForgeError: the options name a host and the run has no other machines, or no free host is left.
        """
        options = component.options
        process_index = index // options.per_process  # light replicas share a process
        if options.mesh is not None and options.mesh.mesh is not None:
            gpus = options.gpus_per_proc if options.with_gpus else 0
            return await self._user.place(
                component.name, process_index, options.mesh.mesh, options.procs, options.groups, gpus
            )

        if self.machines is not None and (options.host or options.host_count is not None or options.with_gpus):
            return await self.machines.hosts_of(component, index, service)
        if options.host is not None:
            raise ForgeError(
                f"{component.name} is configured for host {options.host}, but the run has no hosts: set FORGE_HOSTS"
            )

        if options.host_count is None:
            return Hosts()

        # Replicas of one process share `host_count` hosts in turn: each entry of the list is one host. A replica of
        # several processes has `host_count` separate hosts, which are one entry.
        if options.procs == 1:
            position, size = process_index % options.host_count, 1
        else:
            position, size = index, options.host_count

        loopback_hosts = self.hosts.setdefault(component.name, [])
        while len(loopback_hosts) <= position:
            loopback_hosts.append(LoopbackHosts(f"{component.name}_host{len(loopback_hosts)}", size))
        return loopback_hosts[position]

    def gpus_of(self, component: Component, index: int) -> list[str]:
        """Return the GPUs of replica `index`, as CUDA_VISIBLE_DEVICES names them; its replacement gets the same."""
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
            count, free, name = procs * options.gpus_per_proc, self._free_gpus, component.name
            if count > len(free):
                raise ForgeError(
                    f"{name} asks for {count} GPUs, but {len(free)} are free on this host: lower procs or "
                    f"num_replicas, or set with_gpus to false (--services.{name}.with_gpus false)"
                )
            self._gpus[key], self._free_gpus = free[:count], free[count:]
        return self._gpus[key]

    async def release(self, name: str, index: int | None) -> None:
        """Release the devices and hosts of replica `index` of the service `name`; None stands for all its replicas."""
        for key in [key for key in self._gpus if key[0] == name and index in (key[1], None)]:
            self._free_gpus += self._gpus.pop(key)  # type: ignore[operator]
        if self.machines is not None:
            await self.machines.release(name, index)
        self._user.release(name, index)
        if index is None:
            await asyncio.gather(*(hosts.stop() for hosts in self.hosts.pop(name, [])))

    async def close(self) -> None:
        """Stop all hosts, and end the use of other machines."""
        await asyncio.gather(*(hosts.stop() for component_hosts in self.hosts.values() for hosts in component_hosts))
        if self.machines is not None:
            await self.machines.close()


def procs_of(options: Options) -> int:
    """Return the number of processes that a replica with these options lives in, its share's processes included."""
    return options.share_procs if options.share is not None else options.procs
