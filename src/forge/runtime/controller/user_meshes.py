"""Meshes that a user made with Monarch, for `Options.hosts`: hosts to start processes on, or processes as they are.

procs = this_host().spawn_procs({"gpus": 4})
counter = await Counter.options(hosts=procs).as_actor()                  # a rank in each of its processes
service = await Counter.options(hosts=job.state(), num_replicas=8).as_service()    # on the mesh `counter` of the job
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar
from uuid import uuid4
from weakref import WeakSet

from ..cluster.process import Activity, Process, Watched, machine_id
from ..monarch_names import meshes_of
from ._monarch import HostMesh, ProcMesh, this_host
from .errors import ForgeError, Unrecoverable
from .hosts import Hosts, start_client, transport
from .observers import Observers
from .orphans import client_address
from .private import sockets_folder

ReplicaKey = tuple[str, int]  # a component, and an index
Mesh = TypeVar("Mesh", HostMesh, ProcMesh)


class UserMesh:
    """The value of `Options.hosts` besides numbers: a mesh, or several by name, of which a component gets one.

    Args:
        meshes: by name; the name is empty for a mesh that was handed over itself.
    """

    python_only = True  # no value in a file stands for it

    def __init__(self, meshes: Mapping[str, HostMesh | ProcMesh]) -> None:
        self.meshes = meshes

    @classmethod
    def of(cls, value: object) -> object:
        """Wrap a HostMesh, a ProcMesh or a job's state; return anything else as it is.

        Raises:
            ValueError: a job, not its state.
        """
        if isinstance(value, HostMesh | ProcMesh):
            return cls({"": value})
        if meshes := meshes_of(value):
            return cls(meshes)
        if type(value).__module__.startswith("monarch.") and callable(getattr(value, "state", None)):
            raise ValueError(f"hosts is a {type(value).__name__}: hand over its state, hosts=job.state()")
        return value

    @property
    def mesh(self) -> HostMesh | ProcMesh | None:
        """The mesh, if it is one."""
        return next(iter(self.meshes.values())) if len(self.meshes) == 1 else None

    @property
    def procs(self) -> int | None:
        """Number of processes of a ProcMesh; None of hosts."""
        return self.mesh.size() if isinstance(self.mesh, ProcMesh) else None

    def describe(self) -> str:
        """Describe it for a run's saved configuration and for errors."""
        if self.mesh is None:
            return f"a job with the meshes {', '.join(self.meshes)}"
        # A slice says its own size, not that of the mesh that it is of.
        things = "processes" if isinstance(self.mesh, ProcMesh) else "hosts"
        return f"a {type(self.mesh).__name__} of {self.mesh.size()} {things}"

    def for_component(self, name: str) -> UserMesh:
        """Return the mesh of a component: the only one, or that of its name. ValueError: there is none."""
        if self.mesh is not None:
            return self
        if name not in self.meshes:
            raise ValueError(
                f"hosts: the job has the meshes {', '.join(sorted(self.meshes))}, none of them {name!r}: write "
                f"hosts=job.state().{min(self.meshes)}, or name the component after its mesh (mesh_name)"
            )
        return UserMesh({"": self.meshes[name]})

    def check(self, num_replicas: int, procs: int, per_process: int) -> None:
        """Raise ValueError unless the replicas fit the mesh without a remainder."""
        if self.mesh is None:
            return
        size = self.mesh.size()
        needed = -(-num_replicas // per_process) * procs
        if isinstance(self.mesh, ProcMesh):
            if needed != size:
                raise ValueError(
                    f"hosts is {self.describe()}, and num_replicas = {num_replicas} of procs = {procs} need {needed}: "
                    "let the two agree, or omit procs to share the processes evenly"
                )
            return
        replicas = -(-num_replicas // per_process)
        if procs == 1 and replicas < size:
            raise ValueError(
                f"hosts is {self.describe()}, more than num_replicas = {num_replicas} can fill: raise num_replicas or "
                "procs, or hand over a slice of it"
            )
        if replicas < size and size % replicas:
            raise ValueError(f"hosts is {self.describe()}, which num_replicas = {num_replicas} do not divide")
        if replicas < size and procs % (size // replicas):
            raise ValueError(
                f"procs = {procs} cannot be divided evenly over the {size // replicas} hosts of a replica: hosts is "
                f"{self.describe()} for num_replicas = {num_replicas}"
            )


class ElsewhereProcess:
    """A process of a user's host that is another machine: Monarch notices its end.

    Args:
        machine: the `machine_id` of the host.
        observers: of the hosts, which can see and end it.
    """

    stopped = False
    alive = False  # Monarch's account is all there is

    def __init__(self, pid: int, machine: str, observers: Observers) -> None:
        self.pid = pid
        self.machine = machine
        self._observers = observers
        observers.start()

    def __str__(self) -> str:
        return f"{self.pid} on {self.machine.partition(' ')[0]}"

    def kill(self) -> None:
        """Have its host's observer kill it; otherwise `ProcMesh.stop` ends it."""
        self._observers.kill(self.machine, self.pid)

    async def activity(self) -> Activity | None:
        """Return what it does; None if nothing tells."""
        return await self._observers.activity(self.machine, self.pid)

    async def stacks(self) -> str:
        """Return the Python stack of each of its threads, or say where they are to be looked for."""
        return await self._observers.stacks(self.machine, self.pid) or f"  (process {self}: run py-spy there)"

    def close(self) -> None:
        """Do nothing."""


class UserProcess(Process):
    """A process of a user's ProcMesh on this machine: watched, and never killed here."""

    def kill(self) -> None:
        """Do nothing: the process is the user's."""


class UserProcessElsewhere(ElsewhereProcess):
    """A process of a user's ProcMesh on another machine."""

    def kill(self) -> None:
        """Do nothing: the process is the user's."""


class UserHosts(Hosts):
    """The hosts of one replica in a user's HostMesh. Their workers are the user's: none is started or stopped here.

    Args:
        devices: GPUs of each host that the replica may see, by number.
        observers: of the hosts.
    """

    def __init__(self, mesh: HostMesh | ProcMesh, devices: list[str], observers: Observers) -> None:
        self._mesh = mesh
        self._devices = devices
        self.observers = observers
        self.size = mesh.size()

    async def mesh(self) -> HostMesh | ProcMesh:
        """Return the hosts."""
        start_client()
        return self._mesh

    @property
    def spans_machines(self) -> bool:
        """Whether the processes are on several hosts."""
        return self.size > 1

    def gpus(self) -> dict[str, list[str]]:
        """Return the devices, equal on every host."""
        return {"": self._devices}

    def rendezvous(self) -> str:
        """Return a path in this run's private folder, which ranks on other machines do not reach."""
        return str(sockets_folder() / f"ranks-{uuid4().hex}")

    def controller(self) -> str | None:
        """Return where the controller can be asked for."""
        return client_address()

    def process(self, pid: int, host: str, ended: Callable[[], None]) -> Watched:
        """Watch one of the processes."""
        return Process(pid, ended) if host == machine_id() else ElsewhereProcess(pid, host, self.observers)


class UserProcs(UserHosts):
    """The processes of one replica in a user's ProcMesh. A lost one cannot be replaced: only its owner could."""

    # Monarch says nothing of a process that ended earlier. One that lives imports forge, and answers after .8 to 5 s.
    answer_limit = 60.0

    def __init__(self, name: str, mesh: ProcMesh, on_end: Callable[[], None], observers: Observers) -> None:
        super().__init__(mesh, [], observers)
        self.name = name
        self._on_end = on_end
        self.size = 1
        self._lost = False

    async def mesh(self) -> HostMesh | ProcMesh:
        """Return the processes. Unrecoverable: one of them was lost."""
        if self._lost:
            raise Unrecoverable(
                f"{self.name} ran in a ProcMesh of yours, whose processes only you can start again; with a HostMesh as "
                "hosts, lost processes are replaced"
            )
        return await super().mesh()

    def controller(self) -> str | None:
        """Return None: whether the processes end is their owner's decision."""
        return None

    def process(self, pid: int, host: str, ended: Callable[[], None]) -> Watched:
        """Watch one of the processes."""

        def end() -> None:
            self._on_end()
            ended()

        return UserProcess(pid, end) if host == machine_id() else UserProcessElsewhere(pid, host, self.observers)

    def give_up(self) -> None:
        """Start nothing on them any more."""
        self._lost = True


class UserPlacement:
    """The hosts and devices of replicas on users' meshes."""

    def __init__(self) -> None:
        self._placed: dict[ReplicaKey, UserHosts] = {}
        self._with_losses: WeakSet[ProcMesh] = WeakSet()
        # Each mesh with the devices that replicas have on its hosts. A slice of a mesh counts as another mesh.
        self._devices: list[tuple[HostMesh, dict[ReplicaKey, tuple[range, range]]]] = []
        self._observers: list[tuple[HostMesh | ProcMesh, Observers]] = []

    async def place(
        self, name: str, index: int, mesh: HostMesh | ProcMesh, procs: int, replicas: int, gpus_per_proc: int
    ) -> Hosts:
        """Return the hosts of replica `index`: the same ones for each process that replaces another.

        Args:
            replicas: of the service when it started, in processes.
            gpus_per_proc: 0 without devices.

        Raises:
            ForgeError: a ProcMesh has no process left for a further replica, or lost one; hosts do not answer.
        """
        start_client()
        if isinstance(mesh, HostMesh):
            await _initialized(name, mesh)
            if mesh.size() == 1 and mesh == this_host():
                return Hosts()
        key = name, index
        if key not in self._placed:
            if isinstance(mesh, ProcMesh):
                if (index + 1) * procs > mesh.size():
                    raise ForgeError(f"{name}: all {mesh.size()} processes of its ProcMesh are taken")
                # A new actor in a dead process would be waited for until `answer_limit`.
                if mesh in self._with_losses:
                    raise Unrecoverable(f"{name}: a process of its ProcMesh has ended: spawn the ProcMesh again")
                on_end = partial(self._with_losses.add, mesh)
                part = _part(mesh, index, procs)
                self._placed[key] = UserProcs(f"{name}[{index}]", part, on_end, self._observers_of(mesh))
            else:
                # Fewer replicas than hosts have several hosts each, more share them in turn.
                count = max(1, mesh.size() // replicas)
                number = index % (mesh.size() // count)
                hosts = range(number * count, (number + 1) * count)
                devices = self._take(key, mesh, hosts, procs // count * gpus_per_proc)
                self._placed[key] = UserHosts(_part(mesh, number, count), devices, self._observers_of(mesh))
        return self._placed[key]

    async def close(self) -> None:
        """End the observers of all meshes."""
        await asyncio.gather(*(observers.stop() for _, observers in self._observers))

    def _observers_of(self, mesh: HostMesh | ProcMesh) -> Observers:
        observers = next((observers for owner, observers in self._observers if owner is mesh), None)
        if observers is None:
            observers = Observers(mesh)
            self._observers.append((mesh, observers))
        return observers

    async def release(self, name: str, index: int | None) -> None:
        """Forget a replica, or with None all replicas of a service; end observers of hosts without a replica."""
        for key in [key for key in self._placed if key[0] == name and index in (key[1], None)]:
            hosts = self._placed[key]
            # A lost part of a ProcMesh stays lost for the service that lost it.
            if index is None or not isinstance(hosts, UserProcs):
                del self._placed[key]
            for _, device_ranges in self._devices:
                device_ranges.pop(key, None)
        used = [hosts.observers for hosts in self._placed.values()]
        unused = [observers for _, observers in self._observers if observers not in used]
        self._observers = [(mesh, observers) for mesh, observers in self._observers if observers in used]
        await asyncio.gather(*(observers.stop() for observers in unused))

    def _take(self, key: ReplicaKey, mesh: HostMesh, hosts: range, count: int) -> list[str]:
        """Return the numbers of the next `count` devices of these hosts of a mesh."""
        if not count:
            return []
        device_ranges = next((ranges for owner, ranges in self._devices if owner is mesh), None)
        if device_ranges is None:
            device_ranges = {}
            self._devices.append((mesh, device_ranges))
        stops = (devices.stop for part, devices in device_ranges.values() if {*part} & {*hosts})
        first = max(stops, default=0)
        device_ranges[key] = hosts, range(first, first + count)
        return [str(number) for number in device_ranges[key][1]]


async def _initialized(name: str, mesh: HostMesh) -> None:
    """Wait until the hosts of a mesh have answered. Unrecoverable: Monarch gave them up, after a minute."""
    try:
        await mesh.initialized
    except RuntimeError as error:
        cause = str(error).partition("\n\n")[0]  # the rest is a stack
        # A job of other machines lets what starts after it listen on the network.
        if start_client() == "unix" != transport():
            cause += (
                "\nThis program's first component was started before the job was created, so that other machines "
                "cannot reach the program: create the job (SlurmJob, KubernetesJob, SSHJob) first"
            )
        raise Unrecoverable(f"{name}: {cause}") from None


def _part(mesh: Mesh, number: int, size: int) -> Mesh:
    """Return part `number` of a mesh that is divided into parts of `size`, in the order of its ranks."""
    if mesh.size() == size:
        return mesh
    flat: Mesh = mesh.flatten("part")
    part: Mesh = flat.slice(part=slice(number * size, (number + 1) * size))
    return part
