"""The hosts or processes of replicas on meshes that a user made with Monarch.

procs = this_host().spawn_procs({"gpus": 4})
counter = await Counter.options(hosts=procs).as_actor()                  # a rank in each of its processes
service = await Counter.options(hosts=job.state(), num_replicas=8).as_service()    # on the mesh `counter` of the job

Their workers are the user's: none is started or stopped here. Of a process on another machine only Monarch says that it
has ended, and nothing says whether it hangs or gets no core.
"""

from collections.abc import Callable
from typing import TypeVar
from uuid import uuid4

from ..process import Activity, Process, Watched, machine_id
from ._monarch import HostMesh, ProcMesh, this_host
from .errors import ForgeError, Unrecoverable
from .hosts import Hosts, monarch_transport, start_client
from .private import sockets_folder

ReplicaKey = tuple[str, int]  # a component, and an index
Mesh = TypeVar("Mesh", HostMesh, ProcMesh)


class ElsewhereProcess:
    """A process of a user's host that is another machine: `ProcMesh.stop` ends it."""

    stopped = False

    def __init__(self, pid: int, machine: str) -> None:
        self.pid = pid
        self.machine = machine

    def __str__(self) -> str:
        return f"{self.pid} on {self.machine.partition(' ')[0]}"

    def kill(self) -> None:
        """Do nothing."""

    async def activity(self) -> Activity | None:
        """Return None: nothing tells what it does."""
        return None

    async def stacks(self) -> str:
        """Say where its stacks are to be looked for."""
        return f"  (process {self}: run py-spy there)"

    def close(self) -> None:
        """Do nothing."""


class UserProcess(Process):
    """A process of a user's ProcMesh on this machine: watched, and never killed here."""

    def kill(self) -> None:
        """Do nothing: the process is the user's."""


class UserHosts(Hosts):
    """The hosts of one replica in a user's HostMesh, or its processes in a ProcMesh.

    Args:
        devices: GPUs of each host that the replica may see, by number.
    """

    own_program = True

    def __init__(self, name: str, mesh: HostMesh | ProcMesh, devices: list[str]) -> None:
        self._name = name
        self._mesh = mesh
        self._devices = devices
        self._lost = False
        self.borrowed = isinstance(mesh, ProcMesh)
        self.size = 1 if self.borrowed else mesh.size()

    async def mesh(self) -> HostMesh | ProcMesh:
        """Return the mesh. Unrecoverable: one of its processes was lost, which only their owner could replace."""
        start_client()
        if self._lost and self.borrowed:
            raise Unrecoverable(
                f"{self._name} ran in a ProcMesh of yours, whose processes only you can start again; with a HostMesh "
                "as hosts, lost processes are replaced"
            )
        return self._mesh

    @property
    def spans_machines(self) -> bool:
        """Return whether the processes are on several hosts."""
        return self.size > 1

    def gpus(self) -> dict[str, list[str]]:
        """Return the devices, equal on every host."""
        return {"": self._devices}

    async def rendezvous(self) -> str:
        """Return a path in this run's private folder, which ranks on other machines do not reach."""
        return str(sockets_folder() / f"ranks-{uuid4().hex}")

    def process(self, pid: int, host: str, ended: Callable[[], None]) -> Watched:
        """Watch one of the processes."""
        if host != machine_id():
            return ElsewhereProcess(pid, host)
        return (UserProcess if self.borrowed else Process)(pid, ended)

    def give_up(self) -> None:
        """Start nothing more in the user's processes."""
        self._lost = True


class UserPlacement:
    """The hosts and devices of replicas on users' meshes."""

    def __init__(self) -> None:
        self._placed: dict[ReplicaKey, UserHosts] = {}
        # By mesh, the devices that replicas have on its hosts. A slice of a mesh counts as another mesh.
        self._devices: dict[int, dict[ReplicaKey, tuple[range, range]]] = {}

    async def place(
        self, name: str, index: int, mesh: HostMesh | ProcMesh, procs: int, replicas: int, gpus_per_proc: int
    ) -> Hosts:
        """Return the hosts of replica `index`: the same ones for each process that replaces another.

        Args:
            replicas: of the service when it started, in processes.
            gpus_per_proc: 0 without devices.

        Raises:
            ForgeError: a ProcMesh has no process left for an additional replica. Unrecoverable: hosts do not answer.
        """
        start_client()
        if isinstance(mesh, HostMesh):
            await _wait_for_hosts(name, mesh)
            if mesh.size() == 1 and mesh == this_host():
                return Hosts()

        key = name, index
        if key not in self._placed:
            if isinstance(mesh, ProcMesh):
                if (index + 1) * procs > mesh.size():
                    raise ForgeError(f"{name}: all {mesh.size()} processes of its ProcMesh are taken")
                self._placed[key] = UserHosts(f"{name}[{index}]", _slice_mesh(mesh, index, procs), [])
            else:
                # Fewer replicas than hosts have several hosts each, more share them in turn.
                count = max(1, mesh.size() // replicas)
                number = index % (mesh.size() // count)
                hosts = range(number * count, (number + 1) * count)
                devices = self._take_devices(key, mesh, hosts, procs // count * gpus_per_proc)
                self._placed[key] = UserHosts(f"{name}[{index}]", _slice_mesh(mesh, number, count), devices)

        return self._placed[key]

    def release(self, name: str, index: int | None) -> None:
        """Forget a replica, or with None all replicas of a service."""
        for key in [key for key in self._placed if key[0] == name and index in (key[1], None)]:
            # A lost part of a ProcMesh stays lost for the service that lost it.
            if index is None or not self._placed[key].borrowed:
                del self._placed[key]
            for device_ranges in self._devices.values():
                device_ranges.pop(key, None)

    def _take_devices(self, key: ReplicaKey, mesh: HostMesh, hosts: range, count: int) -> list[str]:
        """Return the numbers of the next `count` devices of these hosts of a mesh."""
        device_ranges = self._devices.setdefault(id(mesh), {})
        stops = (devices.stop for part, devices in device_ranges.values() if {*part} & {*hosts})
        first = max(stops, default=0)
        device_ranges[key] = hosts, range(first, first + count)
        return [str(number) for number in device_ranges[key][1]]


async def _wait_for_hosts(name: str, mesh: HostMesh) -> None:
    """Wait until the hosts of a mesh have answered. Unrecoverable: Monarch gave them up, after a minute."""
    try:
        await mesh.initialized
    except RuntimeError as error:
        cause = str(error).partition("\n\n")[0]  # the rest is a stack
        # A job of other machines lets what starts after it listen on the network.
        if start_client() == "unix" != monarch_transport():
            cause += (
                "\nThis program's first component was started before the job was created, so that other machines "
                "cannot reach the program: create the job (SlurmJob, KubernetesJob, SSHJob) first"
            )
        raise Unrecoverable(f"{name}: {cause}") from None


def _slice_mesh(mesh: Mesh, number: int, size: int) -> Mesh:
    """Return part `number` of a mesh that is divided into parts of `size`, in the order of its ranks."""
    if mesh.size() == size:
        return mesh
    flat: Mesh = mesh.flatten("part")
    part: Mesh = flat.slice(part=slice(number * size, (number + 1) * size))
    return part
