"""The hosts of a run: leased for the run, reacquired after an outage, and divided among its replicas."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.observability.console import log_failure
from forge.runtime.controller.types import keep_until_done
from forge_http.addresses import join_address

from .credentials import Credentials
from .inventory import Inventory
from .machine import Machine, query_host
from .rooms import Demand, NoHostRoom, choose_rooms
from .wire import LEASE, HostError, split_address

log = logging.getLogger(f"forge.{__name__}")

EXPECT = "FORGE_EXPECT_HOSTS"  # environment variable: number of hosts to wait for
REGISTRATION_TIMEOUT = 300.0  # seconds to wait for them: a scheduler may start nodes minutes apart
RETRY_INTERVAL = 1.0  # seconds between attempts to reach a host
# Seconds after which a replica that waits for a host checks again, even if no host changed: if its service has lost its
# last other replica meanwhile, the wait has a limit.
RECHECK_INTERVAL = 1.0

Callback = Callable[[str], Coroutine[Any, Any, None]]  # awaited with the address of a host
Key = tuple[str, int]  # of a replica: the name of its service, and its number


@dataclass
class Allocation:
    """Machines of a replica with its GPUs on each; the replica's processes are divided evenly over the machines."""

    demand: Demand
    machines: list[Machine]
    gpus: dict[str, list[str]]  # by `Machine.peer_address`

    @property
    def procs(self) -> int:
        """Return the number of processes on each machine."""
        return self.demand.procs // len(self.machines)

    @property
    def lost(self) -> bool:
        """Return whether one of the machines is lost."""
        return any(machine.lost.done() for machine in self.machines)


def parse_addresses(hosts: str | Sequence[str]) -> list[str]:
    """Return HOST:PORT of each host.

    Args:
        hosts: a list, or a text: addresses separated by commas, the path of a file with one address a line, or the path
            of a folder of such files, which workers write by `--register`. A path contains a slash.

    Raises:
        OSError: the file cannot be read.
        ValueError: an address is invalid, or listed twice.

    >>> parse_addresses("node1,node2:8000")
    ['node1:7070', 'node2:8000']
    """
    given = hosts.split(",") if isinstance(hosts, str) else hosts
    if isinstance(hosts, str) and os.sep in hosts:
        path = Path(hosts)
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        lines = [line.partition("#")[0].strip() for file in files for line in file.read_text().splitlines()]
        given = [line.split()[0] for line in lines if line]
    addresses = [join_address(*split_address(address.strip())) for address in given]
    repeated = {address for address in addresses if addresses.count(address) > 1}
    if repeated:
        raise ValueError(f"hosts must be distinct, got {', '.join(sorted(repeated))} twice")
    return addresses


class Pool:
    """The hosts of this controller.

    Args:
        hosts: see `parse_addresses`; a file or folder is read again while the run lives.
        wait: seconds that a service without any replica waits for a host.
    """

    def __init__(self, hosts: str | Sequence[str], credentials: Credentials, wait: float) -> None:
        self.hosts, self.wait, self._credentials = hosts, wait, credentials
        self._machines: dict[str, Machine] = {}  # those that are up
        self._allocations: dict[Key, Allocation] = {}
        self._failures: dict[str, str] = {}  # the reason why a host is not up
        self._supervising: dict[str, asyncio.Task] = {}  # one task for each host, in the order of `hosts`
        self._reading: asyncio.Task | None = None
        self._changed = asyncio.Event()
        self._on_up: list[Callback] = []
        self._callbacks: set[asyncio.Task] = set()
        self.on_leaving: Callable[[str], object] | None = None  # called when every host will be taken away
        self.on_lost: list[Callback] = []

    async def open(self, addresses: Sequence[str]) -> None:
        """Lease every host that is up, and from then on every host that joins.

        Raises:
            NoHostRoom: no host is up; the message has the reasons.
        """
        await asyncio.gather(*map(self._lease_host, addresses))
        if not self._machines:
            raise NoHostRoom(f"no host could be reserved: {'; '.join(self._failures.values()) or 'none is given'}")

        # A host that is down at the start may join later.
        for address in addresses:
            if address in self._failures:
                log.warning("%s; retrying", self._failures[address])
            self._supervise_host(address)
        self._reading = asyncio.create_task(self._follow_file())
        self._reading.add_done_callback(log_failure)

    @property
    def machines(self) -> list[Machine]:
        """Return the hosts that are up, in the order of `hosts`."""
        return [self._machines[address] for address in self._supervising if address in self._machines]

    async def allocate(
        self, key: Key, demand: Demand, limited: Callable[[], bool], max_hosts: int | None = None
    ) -> Allocation:
        """Return the machines of a replica: its earlier machines if none is lost, else others as soon as they have
        room.

        Args:
            limited: returns whether the wait has a limit now, as its service has no other replica.
            max_hosts: number of hosts over which the replicas of its service are spread.

        Raises:
            NoHostRoom: there was no room within `wait` seconds.
        """
        if (allocation := self._allocations.get(key)) is not None:
            if not allocation.lost:
                return allocation
            self.release(key)

        # There must be no `await` from the choice to the reservation: another replica would reserve the same resources.
        machines = await self._choose_machines(key[0], demand, limited, max_hosts)
        procs = demand.procs // len(machines)
        gpus = {machine.peer_address: machine.room.reserve(demand, procs) for machine in machines}
        self._allocations[key] = Allocation(demand, machines, gpus)
        return self._allocations[key]

    async def _choose_machines(
        self, service: str, demand: Demand, limited: Callable[[], bool], max_hosts: int | None
    ) -> list[Machine]:
        """Return machines for a demand, as soon as they have room. Arguments as for `allocate`."""
        start = time.monotonic()
        warned = False
        while True:
            machines = {machine.room: machine for machine in self.machines if _admits(machine, demand)}
            of_service = [allocation for key, allocation in self._allocations.items() if key[0] == service]
            used = {machine.room for allocation in of_service for machine in allocation.machines}
            try:
                chosen_rooms = choose_rooms(
                    list(machines), demand, [room for room in machines if room in used], max_hosts
                )
                return [machines[room] for room in chosen_rooms]
            except NoHostRoom as error:
                absent = [reason for address, reason in self._failures.items() if address not in self._machines]
                text = "; ".join([str(error), *absent])
                if limited() and time.monotonic() - start > self.wait:
                    raise NoHostRoom(f"{text} (waited {self.wait:g} s)") from None
                if not warned:
                    # A replica that must be on one host often waits for it, and its component logs the loss.
                    log.log(logging.DEBUG if demand.host else logging.WARNING, "%s; waiting for a host", text)
                    warned = True

            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), RECHECK_INTERVAL)

    def release(self, key: Key) -> None:
        """Release what `allocate` reserved for a replica, if it did."""
        if (allocation := self._allocations.pop(key, None)) is not None:
            for machine in allocation.machines:
                machine.room.release(allocation.demand, allocation.procs, allocation.gpus[machine.peer_address])
            self._changed.set()

    def on_up(self, call: Callback) -> None:
        """Run `call(address)` as a task for every host that is up, and for every host that joins later."""
        self._on_up.append(call)
        for machine in self.machines:
            self._run_callback(call(machine.peer_address))

    async def close(self) -> None:
        """End the lease of every host."""
        tasks = [*self._supervising.values(), *self._callbacks, *([self._reading] if self._reading else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for machine in self._machines.values():  # also those that are not supervised yet
            machine.end()
        self._machines.clear()

    async def _lease_host(self, address: str) -> None:
        machine = Machine(address, self._credentials)
        try:
            await machine.lease()
            check_versions(machine.inventory)
        except BaseException as error:
            if machine.leased:
                machine.end(logging.DEBUG)
            if not isinstance(error, OSError | HostError | ValueError):
                raise
            # The reason is kept and not raised: the other hosts may be enough.
            self._failures[address] = str(error)
            return

        # From here on the host is part of the pool: replicas are placed on it, and its end is watched.
        self._failures.pop(address, None)
        self._machines[address] = machine
        log.info("host %s: %s", machine, machine.inventory)
        self._run_callback(self._when_leaving(machine))
        for call in self._on_up:
            self._run_callback(call(machine.peer_address))
        self._changed.set()

    def _run_callback(self, callback: Coroutine[Any, Any, None]) -> None:
        async def run_logged() -> None:
            try:
                await callback
            except Exception as error:  # of a component on a host that is bad, or was lost meanwhile
                log.warning("%s: %s", type(error).__name__, error)

        keep_until_done(self._callbacks, asyncio.create_task(run_logged()))

    async def _when_leaving(self, machine: Machine) -> None:
        await machine.leaving.wait()
        if all(machine.leaving.is_set() for machine in self.machines) and self.on_leaving is not None:
            self.on_leaving("SIGTERM at every host")

    def _supervise_host(self, address: str) -> None:
        task = self._supervising[address] = asyncio.create_task(self._reacquire_host(address))
        task.add_done_callback(log_failure)

    async def _reacquire_host(self, address: str) -> None:
        """Try every second to lease a host that is not up, and again whenever it was lost, until cancelled."""
        while True:
            if (machine := self._machines.get(address)) is not None:
                reason = await asyncio.shield(machine.lost)
                del self._machines[address]
                self._failures[address] = f"host {machine} was lost: {reason}"
                for call in self.on_lost:
                    self._run_callback(call(machine.peer_address))
            await asyncio.sleep(RETRY_INTERVAL)
            await self._lease_host(address)

    async def _follow_file(self) -> None:
        """Lease hosts that are added to the file or folder, and forget those that are removed and not up."""
        while isinstance(self.hosts, str) and os.sep in self.hosts:
            await asyncio.sleep(RETRY_INTERVAL)
            try:
                addresses = await asyncio.to_thread(parse_addresses, self.hosts)
            except (OSError, ValueError) as error:
                log.warning("%s cannot be read, so the hosts stay unchanged: %s", self.hosts, error)
                continue
            for address in addresses:
                if address not in self._supervising:
                    self._supervise_host(address)
            # A host that was removed from the file and is up stays with the run until it is lost.
            for address in set(self._supervising) - {*addresses}:
                if address not in self._machines:
                    self._supervising.pop(address).cancel()
                    self._failures.pop(address, None)


def check_versions(inventory: Inventory) -> None:
    """Check that a host has the same versions of Python and of packages as this controller.

    Raises:
        ValueError: it has not; the message names the differences.
    """
    versions = Inventory.of_this_machine(()).versions
    differences = [
        f"{name} {inventory.versions.get(name)}, here {version}"
        for name, version in versions.items()
        if inventory.versions.get(name) != version and name != "python"
    ]
    # Pickled code runs on the same minor version of Python only.
    if inventory.versions.get("python", "").split(".")[:2] != versions["python"].split(".")[:2]:
        differences.insert(0, f"Python {inventory.versions.get('python')}, here {versions['python']}")
    if differences:
        raise ValueError(
            f"host {inventory.name} has other versions than {socket.gethostname()}: {'; '.join(differences)}; install "
            "the same"
        )


def _admits(machine: Machine, demand: Demand) -> bool:
    """Return whether a demand may use a machine, regardless of free resources."""
    is_named = demand.host is None or join_address(*split_address(demand.host)) in (
        machine.address,
        machine.peer_address,
    )
    return is_named and not machine.leaving.is_set()


async def survey_hosts(hosts: str | Sequence[str], credentials: Credentials) -> dict[str, Inventory | str]:
    """Return, by address, the inventory of each host, or the reason for which this run cannot use the host.

    Waits up to five minutes until as many hosts are free as FORGE_EXPECT_HOSTS says.

    Raises:
        NoHostRoom: fewer have registered.
        OSError, ValueError: as `parse_addresses`.
    """
    expected, start = int(os.environ.get(EXPECT, "0")), time.monotonic()
    while True:
        try:
            addresses = await asyncio.to_thread(parse_addresses, hosts)
        except FileNotFoundError:  # no worker has registered yet
            addresses = []
        outcomes = await asyncio.gather(*(_inspect_host(address, credentials) for address in addresses))
        reasons = [outcome for outcome in outcomes if isinstance(outcome, str)]

        elapsed = time.monotonic() - start
        # A host that is held may be free within a lease: the run before this one may have just ended.
        may_be_freed = elapsed < LEASE and any("is held by" in reason for reason in reasons)
        if elapsed > REGISTRATION_TIMEOUT or (len(outcomes) - len(reasons) >= expected and not may_be_freed):
            break
        await asyncio.sleep(RETRY_INTERVAL)

    if len(addresses) < expected:
        registered = ", ".join(addresses) or "none"
        raise NoHostRoom(
            f"{len(addresses)} of {expected} hosts have registered within {REGISTRATION_TIMEOUT:g} s: {registered}"
        )
    return dict(zip(addresses, outcomes, strict=True))


async def _inspect_host(address: str, credentials: Credentials) -> Inventory | str:
    """Return the inventory of a host that a run could use, or the reason why it could not."""
    try:
        reply = await query_host(address, credentials, do="describe")
        inventory = Inventory.from_dict(reply)
        check_versions(inventory)
    except (OSError, HostError, ValueError) as error:
        return str(error)
    return inventory if reply["held_by"] is None else f"host {address} is held by {reply['held_by']}"
