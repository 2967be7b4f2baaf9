"""The runtime of a controller: its services, and the processes that they run in."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING

from ...observability.console import configure_logging, log, log_failure
from ...observability.metrics import Snapshot, drain, on_the_clock
from ..forking.forkserver import bound
from . import processes, remote_service
from ._monarch import HostMesh, set_fault_hook
from .errors import CallTimeout, ReplicaDied
from .home import WatchedForkServer, check_private_folder, forked_processes, private_folder
from .hosts import Hosts
from .options import Options, snake_case
from .placement import Placement
from .ports import has_port
from .processes import ProcessGroup
from .replica import TEARDOWN_PATIENCE, Component, Replica
from .request import Kwargs, Pending
from .service import Service
from .starting import Standbys
from .user_meshes import UserHosts
from .watchdog import Watchdog

if TYPE_CHECKING:
    from .actor import ForgeActor

__all__ = ["Runtime", "add_local", "drain_metrics", "forked_processes", "runtime", "shutdown"]


class Runtime:
    """All that one controller has started. Created on first use by `runtime()`, inside a running event loop.

    Attributes:
        services: by name.
        failure: set to an error once a vital service is lost.
        placement: the hosts and devices of replicas.
        shared: the weight store as all hosts reach it; `forge.actors.keeper` sets it.
    """

    def __init__(self) -> None:
        self.services: dict[str, Service] = {}
        self.failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._groups: dict[str, ProcessGroup] = {}
        self._group_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of shared groups
        self.shared: asyncio.Future | None = None
        self.placement = Placement()
        self._fork_server = WatchedForkServer()
        self._names: set[str] = set()
        self._starting: dict[Replica, float] = {}
        self._pending_stops: set[asyncio.Future] = set()
        self._watchdog = asyncio.get_running_loop().create_task(Watchdog(self.services, self._starting).watch())
        self._watchdog.add_done_callback(log_failure)
        remote_service.open_relay(self.services.__getitem__)

    async def start(self, cls: type[ForgeActor], options: Options, args: tuple, kwargs: Kwargs) -> Service:
        """Start `options.num_replicas` replicas of a component and wait until they serve.

        Raises:
            what a replica's `__init__` or `setup` raised; no process of the service remains then.
        """
        endpoints = cls.endpoints()
        # An endpoint that answers through a port may leave the thread long before it answers.
        plain = frozenset(
            name
            for name in endpoints
            if not inspect.iscoroutinefunction(getattr(cls, name)) and not has_port(getattr(cls, name))
        )
        component = Component(self._name(cls, options), cls, options, args, kwargs, plain)
        on_dead = self._on_dead if cls.vital else log_loss
        service = Service(component, endpoints, self._launcher(component), self.placement.release, on_dead)
        self.services[component.name] = service
        try:
            await service.scale(options.num_replicas)
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(service.stop()))
            del self.services[component.name]
            self._names.discard(component.name)
            raise
        return service

    async def drain_metrics(self, profiles: Mapping[str, str]) -> Snapshot:
        """Merge the metrics that every living process recorded since the last call."""
        merged = drain()
        # One replica for each process: the components of a process share its metrics. One that spans all processes of a
        # group speaks for them.
        by_process: dict[tuple[ProcessGroup, int | None], Replica] = {}
        for service in self.services.values():
            for supervisor in service._supervisors:
                if supervisor.state == "up" and supervisor.replica is not None:
                    by_process[supervisor.replica.group, supervisor.replica.process_index] = supervisor.replica
        speakers = [
            replica
            for (group, process), replica in by_process.items()
            if process is None or (group, None) not in by_process
        ]
        drains = (replica.drain_metrics(profiles) for replica in speakers)
        for snapshots in await asyncio.gather(*drains, return_exceptions=True):
            if isinstance(snapshots, ReplicaDied):
                continue  # and its metrics are lost with it
            if isinstance(snapshots, BaseException):
                raise snapshots
            for snapshot in snapshots:
                merged.merge(snapshot)
        return merged

    async def shutdown(self) -> None:
        """Stop every component; returns when their processes have ended."""
        self._watchdog.cancel()
        self._fork_server.close()
        await asyncio.gather(*(service.stop() for service in self.services.values()), return_exceptions=True)
        await asyncio.gather(*self._pending_stops, return_exceptions=True)
        await self.placement.close()
        remote_service.close_relay()

    def _launcher(self, component: Component) -> Callable[[int, int], Pending[Replica]]:
        async def launch(index: int, incarnation: int) -> Replica:
            group = await self._group(component, index)
            replica = Replica(component, index, incarnation, group)
            self._starting[replica] = time.monotonic()
            try:
                await replica.start()
            except BaseException as error:
                replica.fail(f"its start failed: {error}", blameless=True)
                if not group.pids:
                    group.hosts.give_up()
                if not group.shared or component.options.heavy or isinstance(error, CallTimeout):
                    # Its remains would disturb the next attempt: torch.distributed, device memory.
                    group.fail("its start failed")  # kills; nothing waits for its orderly stop below
                pending = asyncio.ensure_future(replica.stop())
                self._pending_stops.add(pending)
                pending.add_done_callback(self._pending_stops.discard)
                raise
            finally:
                del self._starting[replica]
            return replica

        return launch

    async def _group(self, component: Component, index: int) -> ProcessGroup:
        """Return the processes for a replica: new ones, or those that it shares if they live."""
        options = component.options
        name = f"{component.name}{index}"
        shared = options.share is not None or options.per_process > 1
        if shared:
            name = options.share or f"{component.name}_{index // options.per_process}"
            group = self._groups.get(name)
            if group is not None and group.dead is None:
                group.check_options(component.name, options)
                return group
        check_private_folder()
        hosts = await self.placement.hosts_of(component, index, self.services[component.name])
        gpus = hosts.gpus() or {"": self.placement.gpus_of(component, index)}
        procs = options.share_procs if options.share is not None else max(1, options.procs // hosts.size)
        mesh = await hosts.mesh()
        # Another component of the share may have started it while this one waited.
        async with self._group_locks[name] if shared else nullcontext():
            group = self._groups.get(name) if shared else None
            if group is not None and group.dead is None:
                return group
            standbys = None
            variables = processes.allocator_settings(options) | hosts.variables()
            # On this host the processes start ahead of Monarch, which limits the time of a start. A forked one has
            # imported its libraries: it cannot have other settings of theirs than the server's.
            if type(hosts) is Hosts:
                forkable = options.threads == 1 and not any(gpus.values()) and not bound(options.env)
                server = self._fork_server.current()
                standbys = Standbys(name, procs, private_folder(), variables)
                await standbys.start(server if forkable else None, options.setup_timeout)
            spawned = mesh
            if isinstance(mesh, HostMesh):
                spawned = processes.spawn(
                    mesh, name, procs, options, gpus, variables, standbys,
                    spans_machines=hosts.spans_machines, default_program=isinstance(hosts, UserHosts),
                )  # fmt: skip
            group = ProcessGroup(name, spawned, options, hosts, standbys, shared=shared)
            if shared:
                self._groups[name] = group
            return group

    def _name(self, cls: type[ForgeActor], options: Options) -> str:
        """Return `replay_buffer` for `ReplayBuffer`, numbered from the second on."""
        base = options.mesh_name or snake_case(cls.__name__)
        names = (base if number == 1 else f"{base}{number}" for number in itertools.count(1))
        name = next(name for name in names if name not in self._names)
        self._names.add(name)
        return name

    def _on_dead(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_result(error)


def log_loss(error: BaseException) -> None:
    """Log the loss of a component that a run continues without."""
    log.warning("%s", error)


_runtime: Runtime | None = None
_local: list[ForgeActor] = []  # components of this process, see `ForgeActor.as_local`


def runtime() -> Runtime:
    """Return the runtime of this controller, created on first use inside a running event loop."""
    global _runtime
    if _runtime is None:
        configure_logging()
        private_folder()
        set_fault_hook(lambda failure: None)  # each replica notices faults by itself, and its error names them
        _runtime = Runtime()
    return _runtime


def add_local(component: ForgeActor) -> None:
    """Register a component of this process, for `shutdown` to tear down."""
    _local.append(component)


async def shutdown() -> None:
    """Stop everything that this controller started. A new runtime may be created afterwards."""
    global _runtime
    while _local:
        component = _local.pop()
        try:
            closing = component.teardown()
            if closing is not None:
                await asyncio.wait_for(closing, TEARDOWN_PATIENCE)
        except Exception as error:
            log.warning("%s: teardown failed: %s", type(component).__name__, error)
    if _runtime is not None:
        stopping = _runtime
        _runtime = None
        await stopping.shutdown()


async def drain_metrics(profiles: Mapping[str, str] | None = None) -> Snapshot:
    """Merge the metrics that any process recorded since the last call. Those of a process that died since are lost.

    Args:
        profiles: folders by component: its processes are profiled until the next call.
    """
    with on_the_clock("drain_metrics"):
        return await runtime().drain_metrics(profiles or {})
