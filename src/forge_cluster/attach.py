"""Other machines of a run, as `forge.runtime.controller` uses them by the entry point `forge.machines`."""

import asyncio
import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from secrets import token_hex
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

from forge.runtime.controller import ForgeError, Options, ReplicaDied, Unrecoverable
from forge.runtime.controller._monarch import HostMesh, enable_tls, new_service_proc_id
from forge.runtime.controller.home import private_folder
from forge.runtime.controller.hosts import Hosts, attach_workers
from forge.runtime.controller.placement import Waiting, procs_of
from forge.runtime.controller.replica import Component
from forge.runtime.controller.runtime import runtime
from forge.runtime.names import HOSTS
from forge.runtime.process_groups import TCP
from forge_http.addresses import join_address

from .credentials import Credentials, read_secret
from .inventory import Inventory
from .machine import Machine, RemoteProcess, query_host
from .pool import Allocation, Pool, parse_addresses, survey_hosts
from .rooms import Demand, NoHostRoom, check_fit
from .store_ref import share_across_hosts
from .wire import LEASE, HostError, split_address


async def attach_hosts(hosts: str | Sequence[str], wait: float = 600.0) -> "PooledMachines":
    """Lease other machines for this run, before its first component starts.

    Each of them runs `forge worker` with the same FORGE_SECRET.

    Args:
        hosts: HOST:PORT of each worker, or the path of a file that lists them.
        wait: seconds that a service without any replica waits for a host.

    Raises:
        NoSecret: FORGE_SECRET is not set.
        ForgeError: no host could be leased (the message has the reasons), or a component was already started.
    """
    secret = read_secret()
    with _temporary_credentials() as credentials:
        addresses = list(await survey_hosts(hosts, credentials))
    if not addresses:
        raise ForgeError(f"hosts must have at least one address, got none from {hosts}")
    if runtime().services:
        raise ForgeError("attach hosts before the first component is started")

    # Monarch reads the certificates from the environment when it starts to listen.
    address = own_address(addresses)
    credentials = Credentials.make(secret, private_folder(), [address])
    os.environ.update(credentials.environment)
    enable_tls(address)
    pool = Pool(hosts, credentials, wait)

    try:
        await pool.open(addresses)
    except BaseException:
        await pool.close()
        raise

    return PooledMachines(pool)


class PooledMachines:
    """The machines of a pool, see `forge.runtime.controller.placement.Machines`."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._hosts: dict[tuple[str, int], PooledHosts] = {}
        self._shared: asyncio.Future[Any] | None = None

    async def hosts_of(self, component: Component, index: int, service: Waiting) -> "PooledHosts":
        """Return the hosts of the replica number `index`, once the pool has room for it.

        Raises:
            Unrecoverable: the pool has no room in time.
        """
        options = component.options
        key = component.name, index // options.per_process
        # Processes that several components share are placed once, under the name of the share.
        if options.share is not None:
            key = f"share {options.share}", 0

        max_hosts = options.host_count if options.procs == 1 else None
        demand = demand_of(f"{component.name}[{index}]", options)
        with service.waiting_for_host(index):
            if key in self._hosts and self._hosts[key].allocation.lost:
                await self._hosts.pop(key).stop()  # the workers on hosts that are not lost

            try:
                # A run without its last replica of a vital component makes no progress: then the wait has a limit.
                allocation = await self.pool.allocate(
                    key, demand, lambda: component.cls.vital and service.is_only_replica(index), max_hosts
                )
            except NoHostRoom as error:
                raise Unrecoverable(str(error)) from error

        if key not in self._hosts or self._hosts[key].allocation is not allocation:
            self._hosts[key] = PooledHosts(f"{component.name}{index}", allocation)
        return self._hosts[key]

    async def release(self, name: str, index: int | None) -> None:
        """Stop the workers of a replica of a service, and release its hosts; of all replicas if `index` is None."""
        for key in [key for key in self._hosts if key[0] == name and index in (key[1], None)]:
            await self._hosts.pop(key).stop()
            self.pool.release(key)

    async def share(self, store: Any) -> Any:
        """Return a weight store that the processes on all machines can use."""
        if self._shared is None:
            self._shared = asyncio.ensure_future(share_across_hosts(store, self.pool))
        return await self._shared

    def when_leaving(self, call: Callable[[str], object]) -> None:
        """Call `call(reason)` when it is announced that all machines will be taken away."""
        self.pool.on_leaving = call

    async def close(self) -> None:
        """End the leases of all machines."""
        await self.pool.close()


class PooledHosts(Hosts):
    """The machines that the pool has allocated to a replica, with a worker on each for this replica only.

    Monarch cannot attach again to a worker that was lost: `mesh` starts new workers then.
    """

    def __init__(self, name: str, allocation: Allocation) -> None:
        self.name, self.allocation = name, allocation
        self.size = len(allocation.machines)
        self.notice_after = LEASE + 1.0 if self.spans_machines else 1.0
        self._workers: dict[Machine, str] = {}
        self._mesh: HostMesh | None = None
        self._lock = asyncio.Lock()

    async def mesh(self) -> HostMesh:
        """Return the mesh of all workers, which are started if there is none or one of them has ended.

        Raises:
            ReplicaDied: no worker could be started on one of the machines.
        """
        async with self._lock:
            if self._mesh is None or any(worker in machine.ended for machine, worker in self._workers.items()):
                await self.stop()
                machines = self.allocation.machines
                starts = [machine.request("start", identity=str(new_service_proc_id())) for machine in machines]
                started = await asyncio.gather(*starts, return_exceptions=True)

                # Kept also if one start failed: `stop` must end the workers that did start.
                pairs = zip(machines, started, strict=True)
                self._workers = {machine: worker for machine, worker in pairs if isinstance(worker, str)}
                for error in started:
                    if isinstance(error, HostError):
                        raise ReplicaDied(str(error)) from error
                    if isinstance(error, BaseException):
                        raise error

                self._mesh = attach_workers(self.name, [self._workers[machine] for machine in machines])

            return self._mesh

    def gpus(self) -> dict[str, list[str]]:
        """Return the names of the allocated GPUs, by the address of their machine."""
        return self.allocation.gpus

    def variables(self) -> dict[str, str]:
        """Return no variables: the workers on the machines have their own."""
        return {}

    async def rendezvous(self) -> str:
        """Return where the processes of the replica meet: for several machines, a free port of the first one."""
        if not self.spans_machines:
            return await super().rendezvous()
        machine = self.allocation.machines[0]
        host, _ = split_address(machine.peer_address)
        return f"{TCP}{join_address(host, await machine.request('port'))}"

    def process(self, pid: int, host: str, ended: Callable[[], None]) -> RemoteProcess:
        """Watch the process `pid` on the machine with the address `host`; `ended` is called when it ends."""
        machine = next(machine for machine in self.allocation.machines if machine.peer_address == host)
        return RemoteProcess(machine, pid, ended)

    def when_lost(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost(reason)` when one of the machines is lost."""

        def report_loss(machine: Machine, lost: asyncio.Future[str]) -> None:
            on_lost(f"host {machine} was lost: {lost.result()}")

        for machine in self.allocation.machines:
            machine.lost.add_done_callback(partial(report_loss, machine))

    def give_up(self) -> None:
        """Discard the mesh, so that the next use of `mesh` starts new workers."""
        self._mesh = None

    async def stop(self) -> None:
        """Stop the workers on all machines."""
        workers, self._workers, self._mesh = self._workers, {}, None
        stopping = [machine.request("stop", worker=worker) for machine, worker in workers.items()]
        for error in await asyncio.gather(*stopping, return_exceptions=True):
            if isinstance(error, Exception) and not isinstance(error, HostError):  # lost hosts stop their workers
                raise error


def demand_of(owner: str, options: Options) -> Demand:
    """Return the resources that one replica with these options needs; `owner` names it in errors."""
    return Demand(
        owner,
        procs_of(options),
        options.gpus_per_proc if options.with_gpus else 0,
        options.host_count if options.procs > 1 else None,
        int((options.memory_gb or 0) * 1e9),
        options.threads,
        options.host,
    )


def check_room(hosts: str | Sequence[str], placements: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that the components of a run fit on the hosts, before anything starts.

    Args:
        placements: the options of each component, by its setting, such as "services.trainer".

    Raises:
        ValueError: they do not fit; the message lists the free resources of each host.
    """
    demands = []
    shares = set()
    addresses = parse_addresses(hosts)
    for setting, placement in placements.items():
        options = Options(**placement)
        if options.host is not None and join_address(*split_address(options.host)) not in addresses:
            raise ValueError(
                f"{setting}.host is {options.host}, which must be one of the hosts: {', '.join(addresses)}"
            )
        # Services that share processes need room once; those without hosts or GPUs run on the controller's machine.
        if options.share in shares or (options.host_count is None and not options.with_gpus):
            continue
        shares |= {options.share} - {None}
        count = 1 if options.share else math.ceil(options.num_replicas / options.per_process)
        demands += [demand_of(f"{setting}, replica {index}", options) for index in range(count)]

    outcomes: dict[str, Inventory | str] = {}
    try:
        with _temporary_credentials() as credentials:
            outcomes = asyncio.run(survey_hosts(hosts, credentials))
        check_fit([outcome for outcome in outcomes.values() if isinstance(outcome, Inventory)], demands)
    except NoHostRoom as error:
        reasons = [outcome for outcome in outcomes.values() if isinstance(outcome, str)]
        raise ValueError("; ".join([str(error), *reasons])) from None


def check_files(hosts: str | Sequence[str], files: Mapping[Path, str]) -> None:
    """Check that each host sees the same files, as it does if their folder is shared.

    Args:
        files: content of each file, by its path.

    Raises:
        ValueError: a host does not; the message names the host and the folder.
    """
    with _temporary_credentials() as credentials:
        for host in parse_addresses(hosts):
            for path, content in files.items():
                query = {"do": "sees", "path": str(path.absolute()), "content": content}
                try:
                    is_seen = asyncio.run(query_host(host, credentials, **query))
                except (OSError, HostError):  # it is not part of the run yet
                    continue
                if not is_seen:
                    raise ValueError(
                        f"host {host} does not have the directory {path.parent}: share it between all hosts at the "
                        "same path"
                    )


def examine_hosts(hosts: str | None, folder: Path | None) -> tuple[list[str], list[str]]:
    """Return a line on each usable host and the problems of the other hosts, for `forge doctor cluster`.

    Args:
        hosts: as in `parse_addresses`; None for the environment variable FORGE_HOSTS.
        folder: that all hosts should see; None for none.

    Raises:
        ValueError: no hosts are given, or an address or the secret is invalid.
        OSError: a file with the addresses or the secret cannot be read.
        ImportError: the package cryptography is not installed.
    """
    hosts = hosts or os.environ.get(HOSTS)
    if not hosts:
        raise ValueError(f"no hosts are set: pass --hosts, or set the variable {HOSTS}")
    with _temporary_credentials() as credentials:
        outcomes = asyncio.run(survey_hosts(hosts, credentials))
    lines = [
        f"{address}  {outcome.name}: {outcome}, free"
        for address, outcome in outcomes.items()
        if isinstance(outcome, Inventory)
    ]
    problems = [outcome for outcome in outcomes.values() if isinstance(outcome, str)]

    if folder is not None:
        # A random content, so that a file of another process does not count.
        with NamedTemporaryFile("w", dir=folder, prefix=".forge-doctor-") as mark:
            token = token_hex(8)
            mark.write(token)
            mark.flush()
            try:
                check_files(hosts, {Path(mark.name): token})
            except ValueError as error:
                problems.append(str(error))
    return lines, problems


def own_address(hosts: Sequence[str]) -> str:
    """Return the address by which hosts reach this machine; the loopback address only if all hosts are this machine.

    Args:
        hosts: HOST:PORT of each.

    Raises:
        ForgeError: none of them has an address.
    """
    addresses = []
    errors = []
    for host in hosts:
        name, port = split_address(host)
        try:
            family, kind, _, _, destination = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(destination)  # sends nothing, but the kernel chooses an interface
                addresses.append(probe.getsockname()[0])
        except OSError as error:
            errors.append(f"host {host}: {error}")
    if not addresses:
        raise ForgeError(f"no host can be reached from this machine: {'; '.join(errors)}")
    routable = [address for address in addresses if not address.startswith(("127.", "::1"))]
    return (routable or addresses)[0]


@contextmanager
def _temporary_credentials() -> Iterator[Credentials]:
    """Yield certificates in a folder that is removed after the block."""
    with TemporaryDirectory() as folder:
        yield Credentials.make(read_secret(), Path(folder))
