"""Everything that one controller has started: services, the processes they live in, hosts, devices."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import re
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...observability.console import configure_logging, log, log_failure
from ...observability.metrics import Snapshot, drain, on_the_clock
from ...system.scratch import Scratch, sweep
from ..cluster.credentials import SECRET, Credentials, NoSecret, read_secret
from ..cluster.inventory import VISIBLE, visible_gpus
from ..cluster.pool import HOSTS, Demand, NoRoom, Pool, expected
from ..cluster.process import Process
from ..cluster.wire import split
from ..forking.forkserver import ForkServer
from . import private, processes, remote_service
from ._monarch import enable_tls, set_fault_hook
from .errors import CallTimeout, ForgeError, ReplicaDied, Unrecoverable
from .hosts import Hosts, LoopbackHosts, PooledHosts
from .options import Options
from .processes import ProcessGroup
from .replica import TEARDOWN_PATIENCE, Component, Replica
from .service import Service
from .starting import Standbys
from .watchdog import Watchdog

if TYPE_CHECKING:
    from .actor import ForgeActor


class Runtime:
    """Made on first use by `runtime()`, inside a running event loop."""

    def __init__(self) -> None:
        self.services: dict[str, Service] = {}
        self.failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._groups: dict[str, ProcessGroup] = {}
        self._making: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # shared groups
        self.hosts: dict[str, list[Hosts]] = {}
        self._server: Process | None = None  # the fork server
        self.pool: Pool | None = None  # the other machines of this run
        self.shared: Any = None  # the weight store as all hosts reach it
        self._pooled: dict[tuple[str, int], PooledHosts] = {}
        self._gpus: list[str] | None = None
        self._held: dict[tuple[str, int], list[str]] = {}
        self._names: set[str] = set()
        self._starting: dict[Replica, float] = {}
        self._pending_stops: set[asyncio.Future] = set()
        self._watchdog = asyncio.get_running_loop().create_task(Watchdog(self.services, self._starting).watch())
        self._watchdog.add_done_callback(log_failure)
        remote_service.open_relay(self.services.__getitem__)

    async def start(self, cls: type[ForgeActor], options: Options, args: tuple, kwargs: dict[str, Any]) -> Service:
        """Start `options.num_replicas` replicas of a component and wait until they serve.

        Raises:
            what a replica's `__init__` or `setup` raised; nothing of the service is left then.
        """
        endpoints = cls.endpoints()
        plain = frozenset(name for name in endpoints if not inspect.iscoroutinefunction(getattr(cls, name)))
        component = Component(self._name(cls, options), cls, options, args, kwargs, plain)
        on_dead = self._on_dead if cls.vital else log_loss
        service = Service(component, endpoints, self._launcher(component), self._give_back, on_dead)
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
        """Everything recorded since the last call, in every process that lives, merged."""
        merged = drain()
        # One for each process: what the components of a process record is together.
        by_process: dict[tuple[ProcessGroup, int | None], Replica] = {}
        up = (s.replica for service in self.services.values() for s in service._supervisors if s.state == "up")
        for replica in filter(None, up):
            by_process[replica.group, replica.place] = replica
        asked = [r for (group, place), r in by_process.items() if place is None or (group, None) not in by_process]
        drained = await asyncio.gather(*(replica.drain_metrics(profiles) for replica in asked), return_exceptions=True)
        for snapshots in drained:
            if isinstance(snapshots, ReplicaDied):
                continue  # what it had recorded went with it
            if isinstance(snapshots, BaseException):
                raise snapshots
            for snapshot in snapshots:
                merged.merge(snapshot)
        return merged

    async def shutdown(self) -> None:
        """Stop every component; returns when their processes are gone."""
        self._watchdog.cancel()
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*(service.stop() for service in self.services.values()), return_exceptions=True)
        await asyncio.gather(*self._pending_stops, return_exceptions=True)
        await asyncio.gather(*(hosts.stop() for group in self.hosts.values() for hosts in group))
        if self.pool is not None:
            await self.pool.close()
        remote_service.close_relay()

    def _launcher(self, component: Component) -> Callable[[int, int], Any]:
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
                    # What it left behind would be in the way of the next attempt: torch.distributed, device memory.
                    group.fail("its start failed")  # kills; the rest of its end need not be waited for
                pending = asyncio.ensure_future(replica.stop())
                self._pending_stops.add(pending)
                pending.add_done_callback(self._pending_stops.discard)
                raise
            finally:
                del self._starting[replica]
            return replica

        return launch

    async def _group(self, component: Component, index: int) -> ProcessGroup:
        """The processes for a replica: new ones, or those that it shares if they live."""
        options, name = component.options, f"{component.name}{index}"
        shared = options.share is not None or options.per_process > 1
        if shared:
            name = options.share or f"{component.name}_{index // options.per_process}"
            group = self._groups.get(name)
            if group is not None and group.dead is None:
                group.check_agrees(component.name, options)
                return group
        if _scratch is not None and not _scratch.path.is_dir():
            raise Unrecoverable(
                f"{_scratch.path}, which holds this run's sockets, was removed: no process can be started any more. "
                "Exclude forge-run-* where temporary files are cleaned up"
            )
        hosts = await self._hosts_of(component, index)
        gpus = hosts.gpus() or {"": self._gpus_of(component, index)}
        procs = options.share_procs if options.share is not None else max(1, options.procs // hosts.size)
        mesh = await hosts.mesh()
        async with self._making[name] if shared else nullcontext():
            group = self._groups.get(name) if shared else None
            if group is not None and group.dead is None:
                return group
            standbys = None
            if type(hosts) is Hosts:
                plain = options.threads == 1 and not any(gpus.values()) and not options.env
                self._watch_server()
                standbys = Standbys(name, procs, _private_folder(), processes.allocator_settings(options))
                await standbys.start(_server if plain else None, options.setup_timeout)
            spawned = processes.spawn(mesh, name, procs, options, gpus, standbys, spans_machines=hosts.spans_machines)
            group = ProcessGroup(name, spawned, options, hosts, standbys, shared=shared)
            if shared:
                self._groups[name] = group
            return group

    def _watch_server(self) -> None:
        """Replace the fork server as soon as it ends, so that the next process need not wait for its imports."""
        if _server is None or (self._server is not None and self._server.pid == _server.pid):
            return
        if self._server is not None:
            self._server.close()
        self._server = Process(_server.pid, self._on_end_of_server)

    def _on_end_of_server(self) -> None:
        if _server is not None and _server.revive():
            self._watch_server()

    async def _hosts_of(self, component: Component, index: int) -> Hosts:
        """Of a replica; those of the pool, once there is room."""
        options = component.options
        if options.host is not None and self.pool is None:
            raise ForgeError(
                f"{component.name} is to be on host {options.host}, and there are no hosts: set FORGE_HOSTS"
            )
        if self.pool is not None and (options.host or options.hosts is not None or options.with_gpus):
            key, kind = (component.name, index // options.per_process), component.name
            if options.share is not None:
                key, kind = (f"share {options.share}", 0), ""
            service = self.services[component.name]
            most = options.hosts if options.procs == 1 else None
            demand = demand_of(f"{component.name}[{index}]", options)
            with service.waiting_for_a_host(index):
                try:
                    if key in self._pooled and self._pooled[key].place.lost:
                        await self._pooled.pop(key).stop()  # on the hosts that are left
                    limited = lambda: component.cls.vital and service.is_alone(index)  # noqa: E731
                    place = await self.pool.take(key, demand, limited, kind, most)
                except NoRoom as error:
                    raise Unrecoverable(str(error)) from error
            if key not in self._pooled or self._pooled[key].place is not place:
                self._pooled[key] = PooledHosts(f"{component.name}{index}", place)
            return self._pooled[key]
        if options.hosts is None:
            return Hosts()
        known = self.hosts.setdefault(component.name, [])
        spread = options.procs == 1
        number = index // options.per_process % options.hosts if spread else index
        while len(known) <= number:
            known.append(LoopbackHosts(f"{component.name}_host{len(known)}", 1 if spread else options.hosts))
        return known[number]

    def _gpus_of(self, component: Component, index: int) -> list[str]:
        """The devices of a replica: the same ones for each process that takes this place."""
        if not component.options.with_gpus:
            return []
        if self._gpus is None:
            self._gpus = visible_gpus()
        options = component.options
        # Shared devices stay with the name of the share: the next component that shares it finds the same devices.
        key, count = (component.name, index), options.procs
        if options.share is not None:
            key, count = (f"share {options.share}", 0), options.share_procs
        count *= options.gpus_per_proc
        if key not in self._held:
            self._held[key] = processes.take_gpus(self._gpus, count, component.name)
        return self._held[key]

    async def _give_back(self, name: str, index: int | None) -> None:
        """A replica, or with None all of a service, needs its devices and hosts no longer."""
        for key in [key for key in self._held if key[0] == name and index in (key[1], None)]:
            assert self._gpus is not None
            self._gpus += self._held.pop(key)
        for key in [key for key in self._pooled if key[0] == name and index in (key[1], None)]:
            assert self.pool is not None
            await self._pooled.pop(key).stop()
            self.pool.give_back(key)
        if index is None:
            await asyncio.gather(*(hosts.stop() for hosts in self.hosts.pop(name, [])))

    def _name(self, cls: type[ForgeActor], options: Options) -> str:
        """`ReplayBuffer` -> `replay_buffer`, numbered from the second on."""
        base = options.mesh_name or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
        names = (base if number == 1 else f"{base}{number}" for number in itertools.count(1))
        name = next(name for name in names if name not in self._names)
        self._names.add(name)
        return name

    def _on_dead(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_result(error)


def log_loss(error: BaseException) -> None:
    """Of a component that a run continues without."""
    log.warning("%s", error)


_runtime: Runtime | None = None
_local: list[ForgeActor] = []  # components of this process, see `ForgeActor.as_local`
_scratch: Scratch | None = None
_server: ForkServer | None = None  # forks processes instead of starting them


def runtime() -> Runtime:
    """The runtime of this controller; made on first use inside a running event loop."""
    global _runtime
    if _runtime is None:
        configure_logging()
        _private_folder()
        set_fault_hook(lambda failure: None)  # each replica notices faults by itself, and its error names them
        _runtime = Runtime()
    return _runtime


async def attach(hosts: str | Sequence[str] | None = None, wait: float = 600.0) -> None:
    """Take other machines into this run, before its first component is started.

    Components with `hosts` or `with_gpus` are placed there. Each runs `forge worker` with the same FORGE_SECRET.

    Args:
        hosts: HOST:PORT of each worker, or the path of a file of them; None is what FORGE_HOSTS says, if anything.
        wait: seconds that a service without any replica waits for a host.

    Raises:
        NoSecret: FORGE_SECRET is not set. ForgeError: no host could be held; says why. Or it is too late.
    """
    hosts = hosts or os.environ.get(HOSTS)
    if not hosts:
        return
    known = await expected(hosts)
    if (secret := read_secret()) is None:
        raise NoSecret(f"hosts are given and {SECRET} is not set: set it to the secret of their workers")
    if not known:
        raise ForgeError(f"there are no hosts in {hosts}")
    if runtime().pool is not None or runtime().services:
        raise ForgeError("hosts are attached before the first component is started, and once")
    own = own_address(known)
    credentials = Credentials.make(secret, _private_folder(), [own])
    os.environ.update(credentials.environment)
    enable_tls(own)
    pool = Pool(hosts, credentials, wait)
    try:
        await pool.open()
    except NoRoom as error:
        await pool.close()
        raise ForgeError(str(error)) from None
    except BaseException:
        await pool.close()
        raise
    runtime().pool = pool


def own_address(hosts: Sequence[str]) -> str:
    """The address of this machine from which hosts are reached: the loopback only where all of them are on it.

    Raises:
        ForgeError: none of them has an address.
    """
    found, errors = [], []
    for host in hosts:
        name, port = split(host)
        try:
            family, kind, _, _, there = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(there)  # sends nothing
                found.append(probe.getsockname()[0])
        except OSError as error:
            errors.append(f"host {host}: {error}")
    if not found:
        raise ForgeError(f"no host has an address that this machine reaches: {'; '.join(errors)}")
    return next((own for own in found if not own.startswith(("127.", "::1"))), found[0])


def demand_of(who: str, options: Options) -> Demand:
    """What a replica with these options takes of a pool's hosts."""
    return Demand(
        who,
        options.share_procs if options.share is not None else options.procs,
        options.gpus_per_proc if options.with_gpus else 0,
        options.hosts if options.procs > 1 else None,
        int((options.memory_gb or 0) * 1e9),
        options.threads,
        options.host,
    )


@contextmanager
def forked_processes() -> Iterator[None]:
    """Within this context, processes are forked from a server that starts now and imports PyTorch and transformers.

    A process that needs both then starts in a fraction of a second. The variable FORGE_FORK_SERVER=0 turns it off.
    """
    global _server
    if _server is not None or os.environ.get("FORGE_FORK_SERVER") == "0":
        yield
        return
    _server = ForkServer(_private_folder(), {**processes.environment(), VISIBLE[0]: ""})
    try:
        yield
    finally:
        server, _server = _server, None
        server.end()


def _private_folder() -> Path:
    """The folder of this process's sockets, made on first use."""
    global _scratch
    if _scratch is None:
        # Monarch's processes leave their sockets in the folder for temporary files: let that folder be one that goes
        # with this process. Python's own temporary files of this process stay where they were.
        tempfile.tempdir = tempfile.gettempdir()
        sweep()
        _scratch = private.socket_folder()
        os.environ["TMPDIR"] = str(_scratch.path)
        private.sockets_in(_scratch.path)
    return _scratch.path


def add_local(component: ForgeActor) -> None:
    """Have `shutdown` tear down a component of this process."""
    _local.append(component)


async def shutdown() -> None:
    """Stop everything that this controller started. A new runtime may be made afterwards."""
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
    """Everything recorded in any process since the last call, merged. What a process had recorded and not yet handed
    over when it died is lost.

    Args:
        profiles: folders by component: its processes are profiled until the next call.
    """
    with on_the_clock("drain_metrics"):
        return await runtime().drain_metrics(profiles or {})
