"""The runtime of a controller: its services, and the processes that they run in."""

import asyncio
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from ...observability.console import configure_logging, log, log_failure
from ...observability.metrics import Snapshot, drain, on_the_clock
from ..forking.forkserver import ForkServer, bound_variables
from ..process import Process
from . import processes, remote_service
from ._monarch import HostMesh, set_fault_hook
from .errors import CallTimeout, ReplicaDied
from .home import check_private_folder, fork_server, forked_processes, private_folder
from .hosts import Hosts
from .options import Options, snake_case
from .patience import wait_for
from .placement import Placement, procs_of
from .processes import ProcessGroup
from .replica import TEARDOWN_PATIENCE, Component, Replica
from .service import Service
from .types import Kwargs, Pending, keep_until_done
from .watchdog import Watchdog

__all__ = ["Runtime", "add_local", "drain_metrics", "forked_processes", "runtime", "shutdown"]


class Runtime:
    """The services of one controller, and the processes that they run in.

    `runtime()` creates it on first use, inside a running event loop.

    Attributes:
        services: the services by name.
        failure: set to an error once a vital service is lost, which ends the run.
        placement: the hosts and devices of replicas.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.services: dict[str, Service] = {}
        self.failure: asyncio.Future[BaseException] = loop.create_future()
        self.placement = Placement()
        self._groups: dict[str, ProcessGroup] = {}
        self._group_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of shared groups
        self._names: set[str] = set()
        self._starting: dict[Replica, float] = {}
        self._pending_stops: set[asyncio.Future] = set()

        self._watchdog = loop.create_task(Watchdog(self.services, self._starting).watch())
        self._watchdog.add_done_callback(log_failure)
        remote_service.open_relay(self.services.__getitem__)

    async def start(self, cls: type[Any], options: Options, args: tuple, kwargs: Kwargs) -> Service:
        """Start `options.num_replicas` replicas of a component, wait until they serve, and return their service.

        Args:
            cls: the component's class, a subclass of ForgeActor.
            args: positional arguments of its constructor.
            kwargs: keyword arguments of its constructor.

        Raises:
            Exception: what a replica's `__init__` or `setup` raised; no process of the service remains then.
        """
        endpoints = cls.endpoints()
        # A new name, such as replay_buffer, and the next time replay_buffer2.
        base = options.mesh_name or snake_case(cls.__name__)
        names = (base if number == 1 else f"{base}{number}" for number in itertools.count(1))
        component = Component(next(name for name in names if name not in self._names), cls, options, args, kwargs)
        self._names.add(component.name)
        # The run continues without a component that is not vital.
        on_dead = self._on_dead if cls.vital else lambda error: log.warning("%s", error)
        service = self.services[component.name] = Service(
            component, endpoints, self._make_launch(component), self.placement.release, on_dead
        )

        try:
            await service.scale(options.num_replicas)
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(service.stop()))
            del self.services[component.name]
            self._names.discard(component.name)
            raise

        return service

    async def drain_metrics(self, profiles: Mapping[str, str]) -> Snapshot:
        """Return the merged metrics that all living processes, this one included, recorded since the last call.

        Args:
            profiles: the folder for a profile of the next step, by component.
        """
        merged = drain()

        # The components of a process share its metrics: one replica is asked for each process. A process index of None
        # stands for all processes of the group; a replica that spans them answers for all, light ones are not asked.
        by_process: dict[tuple[ProcessGroup, int | None], Replica] = {
            (supervisor.replica.group, supervisor.replica.process_index): supervisor.replica
            for service in self.services.values()
            for supervisor in service._supervisors
            if supervisor.state == "up" and supervisor.replica is not None
        }

        asked_replicas = [
            replica
            for (group, process_index), replica in by_process.items()
            if process_index is None or (group, None) not in by_process
        ]

        drains = (replica.drain_metrics(profiles) for replica in asked_replicas)
        for snapshots in await asyncio.gather(*drains, return_exceptions=True):
            if isinstance(snapshots, ReplicaDied):
                continue  # and its metrics are lost with it
            if isinstance(snapshots, BaseException):
                raise snapshots
            for snapshot in snapshots:
                merged.merge(snapshot)

        return merged

    async def shutdown(self) -> None:
        """Stop every service, and return once all processes have ended."""
        self._watchdog.cancel()
        await asyncio.gather(*(service.stop() for service in self.services.values()), return_exceptions=True)
        await asyncio.gather(*self._pending_stops, return_exceptions=True)
        await self.placement.close()
        remote_service.close_relay()

    def _make_launch(self, component: Component) -> Callable[[int, int], Pending[Replica]]:
        # The function starts replica `index`; `incarnation` counts the replicas that it replaces.
        async def launch_replica(index: int, incarnation: int) -> Replica:
            group = await self._find_group(component, index)
            replica = Replica(component, index, incarnation, group)
            self._starting[replica] = time.monotonic()

            try:
                await replica.start()
            except BaseException as error:
                replica.fail(f"its start failed: {error}", blameless=True)
                if not group.pids:  # not even the first message was answered
                    group.hosts.give_up()

                # The state that remains in the processes (torch.distributed, device memory) would disturb the next
                # attempt: they are killed, unless other components share them and this one leaves nothing.
                if not group.shared or component.options.heavy or isinstance(error, CallTimeout):
                    group.fail("its start failed")
                keep_until_done(self._pending_stops, asyncio.ensure_future(replica.stop()))
                raise
            finally:
                del self._starting[replica]

            return replica

        return launch_replica

    async def _find_group(self, component: Component, index: int) -> ProcessGroup:
        """Return the processes for replica `index` of a component: living ones that it shares, or else new ones."""
        options = component.options
        name = f"{component.name}{index}"
        is_shared = options.share is not None or options.per_process > 1

        if is_shared:
            name = options.share or f"{component.name}_{index // options.per_process}"
            group = self._groups.get(name)
            if group is not None and group.dead is None:
                group.check_options(component.name, options)
                return group

        check_private_folder()
        hosts = await self.placement.hosts_of(component, index, self.services[component.name])
        gpus = hosts.gpus() or {"": self.placement.gpus_of(component, index)}
        procs = max(1, procs_of(options) // hosts.size)
        mesh = await hosts.mesh()

        # Another component of the share may have started the processes while this one waited for a host.
        async with self._group_locks[name] if is_shared else nullcontext():
            group = self._groups.get(name) if is_shared else None
            if group is not None and group.dead is None:
                return group

            if isinstance(mesh, HostMesh):
                # A fork has imported its libraries already: its settings for them must be those of the fork server.
                is_forkable = (
                    type(hosts) is Hosts
                    and options.threads == 1
                    and not any(gpus.values())
                    and not bound_variables(options.env)
                    and not options.env.keys() & processes.ALLOCATOR.keys()
                )
                server = await _ready_server(options.setup_timeout) if is_forkable else None
                mesh = processes.spawn_processes(mesh, name, procs, options, hosts, gpus, server)

            group = ProcessGroup(name, mesh, options, hosts, shared=is_shared)
            if is_shared:
                self._groups[name] = group
            return group

    def _on_dead(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_result(error)


async def _ready_server(seconds: float) -> ForkServer | None:
    """Return the fork server once it has imported its libraries.

    Returns None if there is none for this environment, if it ended, or if its `Patience` of `seconds` is used up.
    """
    server = fork_server()
    if server is None or not server.has_environment(os.environ):
        return None

    # `server.wait` blocks, and notices the end of the process by itself: the process is watched for its activity only.
    process = Process(server.pid, ended=lambda: None)
    try:
        is_ready = await wait_for(asyncio.to_thread(server.wait), [process], seconds)
    except TimeoutError:
        is_ready = False
    finally:
        process.close()
    return server if is_ready else None


_runtime: Runtime | None = None
_local: list[Any] = []  # components of this process, see `ForgeActor.as_local`


def runtime() -> Runtime:
    """Return the runtime of this controller; the first call creates it, and needs a running event loop."""
    global _runtime
    if _runtime is None:
        configure_logging()
        private_folder()
        set_fault_hook(lambda failure: None)  # each replica notices faults by itself, and its error names them
        _runtime = Runtime()
    return _runtime


def add_local(component: Any) -> None:
    """Register a component of this process: `shutdown` calls its `teardown`."""
    _local.append(component)


async def shutdown() -> None:
    """Stop everything that this controller started. A new runtime may be created afterwards."""
    global _runtime
    while _local:
        component = _local.pop()
        try:
            if (closing := component.teardown()) is not None:
                await asyncio.wait_for(closing, TEARDOWN_PATIENCE)
        except Exception as error:
            log.warning("%s: teardown failed: %s", type(component).__name__, error)

    if _runtime is not None:
        stopping, _runtime = _runtime, None
        await stopping.shutdown()


async def drain_metrics(profiles: Mapping[str, str] | None = None) -> Snapshot:
    """Return the merged metrics that all processes of the run recorded since the last call.

    Metrics of a process that died in the meantime are lost.

    Args:
        profiles: the folder for a profile, by component: processes of these components are profiled until the next
            call.
    """
    with on_the_clock("drain_metrics"):
        return await runtime().drain_metrics(profiles or {})
