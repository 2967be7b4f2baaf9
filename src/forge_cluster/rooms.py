"""Which hosts have room for a replica: demands, free resources, and the choice between hosts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from forge.runtime.controller import ForgeError

from .inventory import Inventory


class NoHostRoom(ForgeError):
    """Error: no host or set of hosts has room for a replica; the message lists the free resources of each host."""


@dataclass(frozen=True)
class Demand:
    """Resources that one replica, or one group of shared processes, needs.

    Args:
        owner: names the replica in errors.
        procs: number of processes.
        gpus: number of GPUs for each process.
        hosts: number of hosts to divide the processes over; None for as few as possible.
        memory: bytes for each process, 0 without a limit.
        threads: of each process.
        host: address of the only host that may be used; None if any may be.
    """

    owner: str
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
        return f"{self.owner}: {self.procs} processes{gpus}{memory}{hosts}"


@dataclass(eq=False)
class HostRoom:
    """Free resources of one host: names of GPUs, bytes of memory, and the number of threads that are reserved."""

    inventory: Inventory
    gpus: list[str] = field(default_factory=list)
    memory: int = 0
    threads: int = 0

    @classmethod
    def of_host(cls, inventory: Inventory) -> "HostRoom":
        """Return the free resources of an idle host."""
        return cls(inventory, list(inventory.gpus), inventory.memory)

    def capacity(self, demand: Demand) -> int:
        """Return the number of processes of a demand that fit, at most `demand.procs`; threads may exceed the cores."""
        procs = demand.procs
        if demand.gpus:
            procs = min(procs, len(self.gpus) // demand.gpus)
        if demand.memory:
            procs = min(procs, self.memory // demand.memory)
        return procs

    def reserve(self, demand: Demand, procs: int) -> list[str]:
        """Reserve the resources of `procs` processes; return the names of their GPUs."""
        count = procs * demand.gpus
        reserved, self.gpus = self.gpus[:count], self.gpus[count:]
        self.memory -= procs * demand.memory
        self.threads += procs * demand.threads
        return reserved

    def release(self, demand: Demand, procs: int, gpus: Sequence[str]) -> None:
        """Undo a `reserve` that returned `gpus`."""
        self.gpus = sorted([*self.gpus, *gpus], key=self.inventory.gpus.index)
        self.memory += procs * demand.memory
        self.threads -= procs * demand.threads

    @property
    def load(self) -> float:
        """Return the number of reserved threads per core."""
        return self.threads / max(1, self.inventory.cores)


def choose_rooms(
    rooms: Sequence[HostRoom], demand: Demand, used: Sequence[HostRoom] = (), max_hosts: int | None = None
) -> list[HostRoom]:
    """Return the hosts for a demand, each for the same number of processes, in the order of `rooms`.

    A replica with GPUs is placed on the host with the fewest free GPUs that suffice, so that larger replicas find whole
    hosts; a replica without GPUs on the host with the lowest load.

    Args:
        rooms: the free resources of each host.
        used: those of the hosts that other replicas of its service are on.
        max_hosts: number of hosts over which its service is spread; None for no spreading.

    Raises:
        NoHostRoom: none has room; the message lists the free resources of each host.
    """
    if max_hosts is not None and len(used) >= max_hosts:
        rooms = [room for room in rooms if room in used]

    for count in range(1, demand.procs + 1) if demand.hosts is None else [demand.hosts]:
        if demand.procs % count:
            continue
        fitting = [room for room in rooms if room.capacity(demand) >= demand.procs // count]
        if len(fitting) >= count:
            # A host that the service does not use yet is preferred (False), then few free GPUs, then a low load.
            preferred = sorted(
                fitting,
                key=lambda room: (
                    max_hosts is not None and room in used,
                    len(room.gpus) if demand.gpus else 0,
                    room.load,
                ),
            )[:count]
            return [room for room in rooms if room in preferred]

    lines = [
        f"{room.inventory.name} has {len(room.gpus)} of {len(room.inventory.gpus)} GPUs free, "
        f"{room.memory / 1e9:.0f} GB: {room.capacity(demand)} of these processes fit"
        for room in rooms
    ]
    raise NoHostRoom(f"no host has room for {demand}: {'; '.join(lines) or 'no host is up'}")


def check_fit(inventories: Sequence[Inventory], demands: Sequence[Demand]) -> None:
    """Check that all demands fit on the hosts together, placing the largest first.

    Raises:
        NoHostRoom: they do not; the message names the first that does not fit, and what each host has free then.
    """
    rooms = [HostRoom.of_host(inventory) for inventory in inventories]
    for demand in largest_first(demands):
        rooms_of_demand = choose_rooms(rooms, demand)
        for room in rooms_of_demand:
            room.reserve(demand, demand.procs // len(rooms_of_demand))


def largest_first(demands: Sequence[Demand]) -> list[Demand]:
    """Return the demands with most GPUs first, as small ones fit into what large ones leave."""
    return sorted(demands, key=lambda demand: -demand.gpus * demand.procs)
