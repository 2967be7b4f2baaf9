"""Other machines of a run, as `forge.runtime.controller` uses them by the entry point `forge.machines`."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from forge.runtime.controller import ForgeError, Options, Unrecoverable
from forge.runtime.controller._monarch import enable_tls
from forge.runtime.controller.home import private_folder
from forge.runtime.controller.placement import Waiting, procs_of
from forge.runtime.controller.replica import Component
from forge.runtime.controller.runtime import runtime
from forge.runtime.names import HOSTS
from forge_http.addresses import join_address

from .credentials import SECRET, Credentials, NoSecret, read_secret
from .doctor import Diagnosis, host_sees
from .doctor import query_hosts as examine_hosts
from .hosts import PooledHosts
from .pool import Pool, expected_addresses, parse_addresses, survey_hosts
from .rooms import Demand, NoHostRoom, check_fit
from .store_ref import share_across_hosts
from .wire import split_address


async def attach_hosts(hosts: str | Sequence[str], wait: float = 600.0) -> PooledMachines:
    """Lease other machines for this run, before its first component starts. Each runs `forge worker` with the same
    FORGE_SECRET.

    Args:
        hosts: HOST:PORT of each worker, or the path of a file of them.
        wait: seconds that a service without any replica waits for a host.

    Raises:
        NoSecret: FORGE_SECRET is not set. ForgeError: no host could be leased, with the reasons; or it is too late.
    """
    secret = _require_secret()
    addresses = await expected_addresses(hosts)
    if not addresses:
        raise ForgeError(f"there are no hosts in {hosts}")
    if runtime().services:
        raise ForgeError("hosts are attached before the first component is started")

    # Monarch reads the certificates from the environment when it starts to listen.
    address = own_address(addresses)
    credentials = Credentials.make(secret, private_folder(), [address])
    os.environ.update(credentials.environment)
    enable_tls(address)
    pool = Pool(hosts, credentials, wait)

    try:
        await pool.open()
    except BaseException as error:
        await pool.close()
        if isinstance(error, NoHostRoom):
            raise ForgeError(str(error)) from None
        raise

    return PooledMachines(pool)


class PooledMachines:
    """The machines of a pool, see `forge.runtime.controller.placement.Machines`."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._hosts: dict[tuple[str, int], PooledHosts] = {}
        self._shared: asyncio.Future[Any] | None = None

    async def hosts_of(self, component: Component, index: int, service: Waiting) -> PooledHosts:
        """Return the hosts of a replica, once the pool has room. Unrecoverable: it has none in time."""
        options = component.options
        key = component.name, index // options.per_process
        kind = component.name

        # Processes that several components share are placed once, under the name of the share.
        if options.share is not None:
            key = f"share {options.share}", 0
            kind = ""

        most = options.host_count if options.procs == 1 else None
        with service.waiting_for_host(index):
            if key in self._hosts and self._hosts[key].allocation.lost:
                await self._hosts.pop(key).stop()  # on the hosts that still live

            # A run without its last replica of a vital component makes no progress: then the wait has a limit.
            def is_limited() -> bool:
                return component.cls.vital and service.is_only_replica(index)

            try:
                demand = demand_of(f"{component.name}[{index}]", options)
                allocation = await self.pool.allocate(key, demand, is_limited, kind, most)
            except NoHostRoom as error:
                raise Unrecoverable(str(error)) from error

        if key not in self._hosts or self._hosts[key].allocation is not allocation:
            self._hosts[key] = PooledHosts(f"{component.name}{index}", allocation)
        return self._hosts[key]

    async def release(self, name: str, index: int | None) -> None:
        """Release the hosts of a replica, or with None all replicas of a service."""
        for key in [key for key in self._hosts if key[0] == name and index in (key[1], None)]:
            await self._hosts.pop(key).stop()
            self.pool.release(key)

    async def share(self, store: Any) -> Any:
        """Return a weight store that the processes on all machines can use."""
        if self._shared is None:
            self._shared = asyncio.ensure_future(share_across_hosts(store, self.pool))
        return await self._shared

    def when_leaving(self, call: Callable[[str], object]) -> None:
        """Call `call(reason)` once all machines will be taken away."""
        self.pool.on_leaving = call

    async def close(self) -> None:
        """End the leases."""
        await self.pool.close()


def demand_of(owner: str, options: Options) -> Demand:
    """Return the demand on a pool's hosts of one replica with these options."""
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
    """Check that components fit on the hosts, before anything starts.

    Args:
        placements: the options of each component, by its setting.

    Raises:
        ValueError: lists the room of each host.
    """
    demands = []
    shares = set()
    for setting, placed in placements.items():
        options = Options(**placed)
        addresses = parse_addresses(hosts)
        if options.host is not None and join_address(*split_address(options.host)) not in addresses:
            raise ValueError(f"{setting}.host is {options.host}, which is none of the hosts: {', '.join(addresses)}")
        # Services that share processes need room once; those without hosts or GPUs stay with the controller.
        if options.share in shares or (options.host_count is None and not options.with_gpus):
            continue
        shares |= {options.share} - {None}
        count = 1 if options.share else -(-options.num_replicas // options.per_process)
        demands += [demand_of(f"{setting}, replica {index}", options) for index in range(count)]

    with _temporary_credentials() as credentials:
        failures: list[str] = []
        try:
            machines, failures = asyncio.run(survey_hosts(hosts, credentials))
            check_fit(machines, demands)
        except NoHostRoom as error:
            raise ValueError("; ".join([str(error), *failures])) from None


def check_files(hosts: str | Sequence[str], files: Mapping[Path, str]) -> None:
    """Check that each host sees these files with this content. ValueError: names the host and the folder."""
    with _temporary_credentials() as credentials:
        for host in parse_addresses(hosts):
            for path, content in files.items():
                if not asyncio.run(host_sees(host, credentials, path.absolute(), content)):
                    raise ValueError(
                        f"host {host} does not see {path.parent}: share it between the hosts, at the same path"
                    )


def examine_hosts_of_run(hosts: str | None, folder: Path | None) -> Diagnosis:
    """Examine the hosts of a run, default: FORGE_HOSTS. ValueError, OSError, ImportError: it cannot be
    done."""
    hosts = hosts or os.environ.get(HOSTS)
    if not hosts:
        raise ValueError(f"which hosts? give --hosts, or set {HOSTS}")
    with _temporary_credentials() as credentials:
        return asyncio.run(examine_hosts(parse_addresses(hosts), credentials, folder))


def own_address(hosts: Sequence[str]) -> str:
    """Return the address of this machine from which hosts are reached: the loopback only if all of them are on it.

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
        raise ForgeError(f"no host has an address that this machine reaches: {'; '.join(errors)}")
    return next((address for address in addresses if not address.startswith(("127.", "::1"))), addresses[0])


@contextmanager
def _temporary_credentials() -> Iterator[Credentials]:
    """Yield certificates for the block only."""
    secret = _require_secret()
    with TemporaryDirectory() as folder:
        yield Credentials.make(secret, Path(folder))


def _require_secret() -> str:
    secret = read_secret()
    if secret is None:
        raise NoSecret(f"hosts are given and {SECRET} is not set: set it to the secret of their workers")
    return secret
