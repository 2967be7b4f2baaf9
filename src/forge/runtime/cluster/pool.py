"""The hosts of a run: held while it lives, taken up again when they come back, and divided among its replicas."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...observability.console import log_failure
from ...system.addresses import joined
from .credentials import Credentials
from .inventory import Inventory
from .machine import Machine, describe
from .wire import LEASE, HostError, split

log = logging.getLogger(__name__)

HOSTS = "FORGE_HOSTS"  # environment variable: addresses, or the path of a file or folder of them
EXPECT = "FORGE_EXPECT_HOSTS"  # environment variable: how many hosts to wait for
REGISTERING = 300.0  # seconds to wait for them
RETRY = 1.0  # seconds between attempts to reach a host
LOOK_AGAIN = 1.0  # seconds between looks at what else has changed, while a replica waits for room


class NoRoom(RuntimeError):
    """No host, or no set of hosts, has room for a replica; the message lists the room of each host."""


@dataclass(frozen=True)
class Demand:
    """What one replica, or one group of shared processes, needs.

    Args:
        who: for errors.
        procs: processes.
        gpus: for each process.
        hosts: over how many hosts; None: one if it fits, else as few as it takes.
        memory: bytes for each process, 0 where no limit is set.
        threads: of each process.
        host: the address of the only host that will do.
    """

    who: str
    procs: int = 1
    gpus: int = 0
    hosts: int | None = None
    memory: int = 0
    threads: int = 1
    host: str | None = None

    def __str__(self) -> str:
        gpus = f" with {self.gpus} GPUs each" if self.gpus else ""
        memory = f" and {self.memory / 1e9:.1f} GB each" if self.memory else ""
        hosts = f" on {self.hosts} hosts" if self.hosts is not None else ""
        return f"{self.who}: {self.procs} processes{gpus}{memory}{hosts}"


@dataclass(eq=False)
class Room:
    """Free resources of one host."""

    inventory: Inventory
    gpus: list[str] = field(default_factory=list)
    memory: int = 0
    threads: int = 0  # taken

    @classmethod
    def of(cls, inventory: Inventory) -> Room:
        """All of a host, free."""
        return cls(inventory, list(inventory.gpus), inventory.memory)

    def fits(self, demand: Demand) -> int:
        """How many processes of this kind still fit. Cores may be overcommitted."""
        most = demand.procs
        if demand.gpus:
            most = min(most, len(self.gpus) // demand.gpus)
        if demand.memory:
            most = min(most, self.memory // demand.memory)
        return most

    def take(self, demand: Demand, procs: int) -> list[str]:
        """Take the room of `procs` processes; returns their GPUs."""
        taken, self.gpus = self.gpus[: procs * demand.gpus], self.gpus[procs * demand.gpus :]
        self.memory -= procs * demand.memory
        self.threads += procs * demand.threads
        return taken

    def give_back(self, demand: Demand, procs: int, gpus: Sequence[str]) -> None:
        """Return what `take` reserved."""
        self.gpus = sorted([*self.gpus, *gpus], key=self.inventory.gpus.index)
        self.memory += procs * demand.memory
        self.threads -= procs * demand.threads

    @property
    def load(self) -> float:
        """Threads for each core."""
        return self.threads / max(1, self.inventory.cores)


def choose(rooms: Sequence[Room], demand: Demand, near: Sequence[Room] = (), most: int | None = None) -> list[Room]:
    """The rooms for a demand, each with the same number of processes, in the order of `rooms`.

    A replica with GPUs goes to the fullest host that has room for it, so that larger ones find whole hosts; one without
    goes to the least loaded.

    Args:
        near: hosts that others of its kind are on.
        most: over how many hosts its kind may spread.

    Raises:
        NoRoom: lists the room of each host.
    """
    if most is not None and len(near) >= most:
        rooms = [room for room in rooms if room in near]

    def preference(room: Room) -> tuple[bool, int, float]:
        return most is not None and room in near, len(room.gpus) if demand.gpus else 0, room.load

    for count in range(1, demand.procs + 1) if demand.hosts is None else [demand.hosts]:
        if demand.procs % count:
            continue
        each = demand.procs // count
        fitting = [room for room in rooms if room.fits(demand) >= each]
        if len(fitting) >= count:
            chosen = sorted(fitting, key=preference)[:count]
            return [room for room in rooms if room in chosen]
    lines = []
    for room in rooms:
        lacks = f"{room.fits(demand)} of these processes fit"
        lines.append(
            f"{room.inventory.name} has {len(room.gpus)} of {len(room.inventory.gpus)} GPUs free, "
            f"{room.memory / 1e9:.0f} GB: {lacks}"
        )
    raise NoRoom(f"no room for {demand}: {'; '.join(lines) or 'no host is up'}")


def check(inventories: Sequence[Inventory], demands: Sequence[Demand]) -> None:
    """Whether all demands fit together, the largest first.

    Raises:
        NoRoom: names the first that does not, and what each host has left then.
    """
    rooms = [Room.of(inventory) for inventory in inventories]
    for demand in in_order(demands):
        for room in (chosen := choose(rooms, demand)):
            room.take(demand, demand.procs // len(chosen))


def in_order(demands: Sequence[Demand]) -> list[Demand]:
    """The order in which demands fit best."""
    return sorted(demands, key=lambda demand: -demand.gpus * demand.procs)


@dataclass
class Place:
    """Hosts that a replica has: machines, and the GPUs on each. Its processes are divided evenly over them."""

    demand: Demand
    machines: list[Machine]
    gpus: dict[str, list[str]]  # by the host's address, `Machine.at`

    @property
    def procs(self) -> int:
        """Processes on each host."""
        return self.demand.procs // len(self.machines)

    @property
    def lost(self) -> bool:
        """Whether one of its machines is lost."""
        return any(machine.lost.done() for machine in self.machines)


def addresses(given: str | Sequence[str]) -> list[str]:
    """HOST:PORT of each host: from a list, words separated by commas, a file with one a line, or a folder of such
    files, which workers write by `--register`.

    Raises:
        OSError: the file cannot be read. ValueError: an address is wrong, or there are two of the same.
    """
    words = list(given)
    if isinstance(given, str):
        words = given.split(",")
        if os.sep in given:
            path = Path(given)
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            lines = [line.partition("#")[0].strip() for file in files for line in file.read_text().splitlines()]
            words = [line.split()[0] for line in lines if line]
    found = [joined(*split(word.strip())) for word in words]
    if twice := {address for address in found if found.count(address) > 1}:
        raise ValueError(f"hosts has {', '.join(sorted(twice))} twice")
    return found


async def expected(given: str | Sequence[str]) -> list[str]:
    """The addresses, once there are as many as FORGE_EXPECT_HOSTS says.

    Raises:
        NoRoom: there were not within five minutes. As `addresses`.
    """
    count, end = int(os.environ.get(EXPECT, "0")), time.monotonic() + REGISTERING
    while True:
        try:
            found = await asyncio.to_thread(addresses, given)
        except FileNotFoundError:  # no worker has registered yet
            found = []
        if len(found) >= count and (found or not count):
            return found
        if time.monotonic() > end:
            have = ", ".join(found) or "none"
            raise NoRoom(f"{len(found)} of {count} hosts have registered within {REGISTERING:g} s: {have}")
        await asyncio.sleep(0.2)


class Pool:
    """The hosts of this controller.

    Args:
        given: see `addresses`; a file or folder is read again while the run lives.
        wait: seconds that a service without any replica waits for a host.
    """

    def __init__(self, given: str | Sequence[str], credentials: Credentials, wait: float) -> None:
        self.given, self.wait = given, wait
        self._credentials = credentials
        self._machines: dict[str, Machine] = {}
        self._rooms: dict[str, Room] = {}
        self._places: dict[Hashable, Place] = {}
        self._failures: dict[str, str] = {}  # why a host is not up
        self._keeping: dict[str, asyncio.Task] = {}
        self._reading: asyncio.Task | None = None
        self._changed = asyncio.Event()
        self._on_new: list[Callable[[str], Coroutine[Any, Any, None]]] = []
        self._attending: set[asyncio.Task] = set()
        self.on_leaving: Callable[[str], None] | None = None  # called when every host will be taken away
        self.on_lost: list[Callable[[str], Coroutine[Any, Any, None]]] = []  # awaited with the address of a lost host

    async def open(self) -> None:
        """Hold every host that is up.

        Raises:
            NoRoom: none is; says why.
        """
        wanted, end = await expected(self.given), time.monotonic() + REGISTERING
        await asyncio.gather(*(self._hold(address) for address in wanted))
        while len(self._machines) < int(os.environ.get(EXPECT, "0")) and time.monotonic() < end:
            await asyncio.sleep(RETRY)
            await asyncio.gather(*(self._hold(address) for address in wanted if address not in self._machines))
        if not self._machines:
            raise NoRoom(f"no host could be held: {'; '.join(self._failures.values()) or 'none is given'}")
        for address in wanted:
            if address in self._failures:
                log.warning("%s; it is tried again", self._failures[address])
            self._keep(address)
        self._reading = asyncio.create_task(self._read())
        self._reading.add_done_callback(log_failure)

    @property
    def machines(self) -> list[Machine]:
        """Those that are up, in the order in which they were given."""
        return [self._machines[address] for address in self._keeping if address in self._machines]

    async def take(
        self, key: Hashable, demand: Demand, alone: Callable[[], bool], kind: Hashable = None, most: int | None = None
    ) -> Place:
        """The place of a replica: where it was if that is whole, or another one, as soon as there is room.

        Args:
            alone: whether its service has no other replica; then the wait has a limit.
            kind: of replicas that are spread over at most `most` hosts.

        Raises:
            NoRoom: there was no room within `wait` seconds.
        """
        if (place := self._places.get(key)) is not None:
            if not place.lost:
                return place
            self.give_back(key)
        began, warned = time.monotonic(), False
        while True:
            rooms = {
                address: self._rooms[address]
                for address in self._keeping  # in the order in which they were given
                if (up := self._machines.get(address)) is not None
                and (demand.host is None or joined(*split(demand.host)) in (address, up.at))
                and not up.leaving.is_set()
            }
            near = [
                rooms[machine.address]
                for other, place in self._places.items()
                if kind is not None and isinstance(other, tuple) and other[0] == kind
                for machine in place.machines
                if machine.address in rooms
            ]
            try:
                chosen = choose(list(rooms.values()), demand, list(dict.fromkeys(near)), most)
                break
            except NoRoom as error:
                away = [reason for address, reason in self._failures.items() if address not in self._machines]
                text = f"{error}{'; ' if away else ''}{'; '.join(away)}"
                if alone() and time.monotonic() - began > self.wait:
                    raise NoRoom(f"{text} (waited {self.wait:g} s)") from None
                if not warned:
                    log.log(logging.DEBUG if demand.host else logging.WARNING, "%s; waiting for a host", text)
                    warned = True
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LOOK_AGAIN)
        machines, gpus = [], {}
        for address, room in rooms.items():
            if room in chosen:
                machines.append(self._machines[address])
                gpus[self._machines[address].at] = room.take(demand, demand.procs // len(chosen))
        self._places[key] = place = Place(demand, machines, gpus)
        return place

    def give_back(self, key: Hashable) -> None:
        """A replica needs its place no longer."""
        if (place := self._places.pop(key, None)) is None:
            return
        for machine in place.machines:
            # The room of a host that came back is a new one.
            if self._machines.get(machine.address) is machine:
                self._rooms[machine.address].give_back(place.demand, place.procs, place.gpus[machine.at])
        self._changed.set()

    def on_each(self, call: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        """Have `call(address)` started for every host that is up, and for those that come."""
        self._on_new.append(call)
        for machine in self.machines:
            self._attend(call(machine.at))

    async def close(self) -> None:
        """Give every host back."""
        tasks = [*self._keeping.values(), *self._attending, *([self._reading] if self._reading else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for machine in self._machines.values():  # also those that are not kept yet
            machine.end()
        self._machines.clear()

    async def _hold(self, address: str) -> None:
        machine = Machine(address, self._credentials)
        try:
            await machine.hold()
            agree(machine.inventory)
        except (OSError, HostError, ValueError) as error:
            self._failures[address] = str(error)
            if hasattr(machine, "inventory"):
                machine.end(logging.DEBUG)
            return
        except BaseException:
            if hasattr(machine, "inventory"):
                machine.end(logging.DEBUG)
            raise
        self._failures.pop(address, None)
        self._machines[address] = machine
        self._rooms[address] = Room.of(machine.inventory)
        log.info("host %s: %s", machine, machine.inventory)
        self._attend(self._when_leaving(machine))
        for call in self._on_new:
            self._attend(call(machine.at))
        self._changed.set()

    def _attend(self, work: Coroutine[Any, Any, None]) -> None:
        async def attend() -> None:
            try:
                await work
            except Exception as error:  # of a component on a host that is bad, or was lost meanwhile
                log.warning("%s: %s", type(error).__name__, error)

        self._attending.add(task := asyncio.create_task(attend()))
        task.add_done_callback(self._attending.discard)

    async def _when_leaving(self, machine: Machine) -> None:
        await machine.leaving.wait()
        if all(other.leaving.is_set() for other in self.machines) and self.on_leaving is not None:
            self.on_leaving("SIGTERM at every host")

    def _keep(self, address: str) -> None:
        self._keeping[address] = task = asyncio.create_task(self._take_up_again(address))
        task.add_done_callback(log_failure)

    async def _take_up_again(self, address: str) -> None:
        while True:
            if (machine := self._machines.get(address)) is not None:
                reason = await asyncio.shield(machine.lost)
                del self._machines[address]
                self._failures[address] = f"host {machine} was lost: {reason}"
                for call in self.on_lost:
                    self._attend(call(machine.at))
            await asyncio.sleep(RETRY)
            await self._hold(address)

    async def _read(self) -> None:
        """Take up hosts that are added to the file or folder."""
        while isinstance(self.given, str) and os.sep in self.given:
            await asyncio.sleep(RETRY)
            try:
                wanted = await asyncio.to_thread(addresses, self.given)
            except (OSError, ValueError) as error:
                log.warning("%s cannot be read, its hosts stay as they are: %s", self.given, error)
                continue
            for address in wanted:
                if address not in self._keeping:
                    self._keep(address)
            for address in set(self._keeping) - {*wanted}:
                if address not in self._machines:  # one that is held continues
                    self._keeping.pop(address).cancel()
                    self._failures.pop(address, None)


def agree(inventory: Inventory) -> None:
    """Check that a host has the versions of this controller.

    Raises:
        ValueError: names those that differ.
    """
    import socket

    mine = Inventory.of_this_machine(()).versions
    differ = [
        f"{name} {inventory.versions.get(name)}, here {own}"
        for name, own in mine.items()
        if inventory.versions.get(name) != own and name != "python"
    ]
    if inventory.versions.get("python", "").split(".")[:2] != mine["python"].split(".")[:2]:
        differ.insert(0, f"Python {inventory.versions.get('python')}, here {mine['python']}")
    if differ:
        raise ValueError(f"host {inventory.name} has other versions than {socket.gethostname()}: {'; '.join(differ)}")


async def survey(given: str | Sequence[str], credentials: Credentials) -> tuple[list[Inventory], list[str]]:
    """What the hosts have that can be reached and are free, and why the others are not. Waits for as many as
    FORGE_EXPECT_HOSTS says."""
    began = time.monotonic()
    while True:
        found = await _survey(given, credentials)
        took, enough = time.monotonic() - began, len(found[0]) >= int(os.environ.get(EXPECT, "0"))
        ending = any("is held by" in failure for failure in found[1]) and took < LEASE  # the run before this one
        if (enough and not ending) or took > REGISTERING:
            return found
        await asyncio.sleep(RETRY)


async def _survey(given: str | Sequence[str], credentials: Credentials) -> tuple[list[Inventory], list[str]]:
    inventories, failures = [], []
    for address, found in zip(
        wanted := await expected(given),
        await asyncio.gather(*(describe(address, credentials) for address in wanted), return_exceptions=True),
        strict=True,
    ):
        if isinstance(found, OSError | HostError | ValueError):
            failures.append(str(found))
        elif isinstance(found, BaseException):
            raise found
        elif found[1] is not None:
            failures.append(f"host {address} is held by {found[1]}")
        else:
            try:
                agree(found[0])
                inventories.append(found[0])
            except ValueError as error:
                failures.append(str(error))
    return inventories, failures
