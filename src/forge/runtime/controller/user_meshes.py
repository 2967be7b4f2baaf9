"""The hosts or processes of replicas on meshes that a user made with Monarch.

procs = this_host().spawn_procs({"gpus": 4})
counter = await Counter.options(hosts=procs).as_actor()                  # a rank in each of its processes
service = await Counter.options(hosts=job.state(), num_replicas=8).as_service()    # on the mesh `counter` of the job

The workers of these meshes are the user's: none is started or stopped here. For a process on another machine only
Monarch reports that it has ended, and nothing reports whether it hangs or gets no core.
"""

from collections.abc import Callable
from typing import TypeVar
from uuid import uuid4

from ..process import Activity, Process, machine_id
from ._monarch import HostMesh, ProcMesh, this_host
from .errors import ForgeError, Unrecoverable
from .hosts import Hosts, monarch_transport, start_client
from .private import sockets_folder

ReplicaKey = tuple[str, int]  # a component's name and a replica's index
Mesh = TypeVar("Mesh", HostMesh, ProcMesh)


class ElsewhereProcess(Process):
    """Process on another machine of a user's mesh, which cannot be observed or killed from this machine.

    `ProcMesh.stop` ends it.

    Args:
        machine: its `machine_id`.
    """

    stopped = False

    def __init__(self, pid: int, machine: str) -> None:
        self.pid, self.machine = pid, machine

    def __str__(self) -> str:
        return f"{self.pid} on {self.machine.partition(' ')[0]}"

    async def activity(self) -> Activity | None:
        """Return None: its activity cannot be seen from here."""
        return None

    async def stacks(self) -> str:
        """Return a line that says where py-spy can read its stacks."""
        return f"  (process {self}: run py-spy there)"


class UserProcess(Process):
    """Process of a user's ProcMesh on this machine, which is watched and never killed by forge."""

    def kill(self) -> None:
        """Do nothing: the process is the user's."""


class UserHosts(Hosts):
    """The hosts of one replica in a user's HostMesh, or its processes in a user's ProcMesh.

    Args:
        name: of the replica, for errors.
        mesh: the part of the user's mesh that the replica has.
        devices: numbers of the GPUs that the replica may see on each of its hosts.
    """

    own_program = True

    def __init__(self, name: str, mesh: HostMesh | ProcMesh, devices: list[str]) -> None:
        self._name, self._mesh, self._devices = name, mesh, devices
        self._lost = False
        self.borrowed = isinstance(mesh, ProcMesh)
        self.size = 1 if self.borrowed else mesh.size()

    async def mesh(self) -> HostMesh | ProcMesh:
        """Return the replica's part of the mesh.

        Raises:
            Unrecoverable: a process of a ProcMesh was lost, which only the user can start again.
        """
        start_client()
        if self._lost and self.borrowed:
            raise Unrecoverable(
                f"{self._name} ran in your ProcMesh, whose processes forge cannot restart: start the run again, or "
                "pass a HostMesh as hosts, where lost processes are replaced"
            )
        return self._mesh

    def gpus(self) -> dict[str, list[str]]:
        """Return the devices under the empty address, because they are the same on every host."""
        return {"": self._devices}

    async def rendezvous(self) -> str:
        """Return a new path in this run's private folder, where the ranks of this machine meet.

        Ranks on other machines cannot reach it: `process_store` raises an error there.
        """
        return str(sockets_folder() / f"ranks-{uuid4().hex}")

    def process(self, pid: int, host: str, ended: Callable[[], None]) -> Process:
        """Return a watcher of one of the processes; it calls `ended()` when a process of this machine ends."""
        if host != machine_id():
            return ElsewhereProcess(pid, host)
        return (UserProcess if self.borrowed else Process)(pid, ended)

    def give_up(self) -> None:
        """Mark the user's processes as lost, so that nothing more is started in them."""
        self._lost = True


class UserPlacement:
    """The hosts and devices of replicas on meshes that users made."""

    def __init__(self) -> None:
        self._placed: dict[ReplicaKey, UserHosts] = {}
        # By the id() of a mesh: for each replica on it the hosts, as ranks of the mesh, and the numbers of its devices
        # on each of them. A slice of a mesh counts as another mesh.
        self._devices: dict[int, dict[ReplicaKey, tuple[range, range]]] = {}

    async def place(
        self, name: str, index: int, mesh: HostMesh | ProcMesh, procs: int, replicas: int, gpus_per_proc: int
    ) -> Hosts:
        """Return the hosts, or processes, of replica `index` on a mesh; its replacements get the same ones.

        Args:
            name: the component's name.
            index: of the replica; light replicas that share a process count as one.
            procs: number of processes of one replica.
            replicas: number of replicas when the service started, counted like `index`.
            gpus_per_proc: GPUs of each process; 0 for none.

        Raises:
            ForgeError: a ProcMesh has no process left for an additional replica.
            Unrecoverable: hosts do not answer.
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
                    raise ForgeError(
                        f"{name}: all {mesh.size()} processes of its ProcMesh are in use: pass a larger ProcMesh, or "
                        "lower num_replicas or procs"
                    )
                self._placed[key] = UserHosts(f"{name}[{index}]", _slice_mesh(mesh, index, procs), [])
            else:
                # The mesh is divided into parts of as many hosts as there are for each replica, at least one. With more
                # replicas than hosts several replicas share a part, in turn.
                part_size = max(1, mesh.size() // replicas)
                part_index = index % (mesh.size() // part_size)
                hosts = range(part_index * part_size, (part_index + 1) * part_size)
                devices = self._take_devices(key, mesh, hosts, procs // part_size * gpus_per_proc)
                self._placed[key] = UserHosts(f"{name}[{index}]", _slice_mesh(mesh, part_index, part_size), devices)

        return self._placed[key]

    def release(self, name: str, index: int | None) -> None:
        """Release the hosts and devices of replica `index` of the service `name`; None stands for all its replicas."""
        for key in [key for key in self._placed if key[0] == name and index in (key[1], None)]:
            # Until its service ends, a replica keeps its part of a ProcMesh: a part that was lost stays lost.
            if index is None or not self._placed[key].borrowed:
                del self._placed[key]
            for device_ranges in self._devices.values():
                device_ranges.pop(key, None)

    def _take_devices(self, key: ReplicaKey, mesh: HostMesh, hosts: range, count: int) -> list[str]:
        """Return the numbers of the first `count` devices that are free on all of these hosts of a mesh.

        They are those after the devices of all replicas that share one of the hosts.
        """
        device_ranges = self._devices.setdefault(id(mesh), {})
        used_until = (devices.stop for used_hosts, devices in device_ranges.values() if {*used_hosts} & {*hosts})
        first = max(used_until, default=0)
        device_ranges[key] = hosts, range(first, first + count)
        return [str(number) for number in range(first, first + count)]


async def _wait_for_hosts(name: str, mesh: HostMesh) -> None:
    """Wait until the hosts of a mesh have answered.

    Raises:
        Unrecoverable: Monarch gave them up, after a minute.
    """
    try:
        await mesh.initialized
    except RuntimeError as error:
        cause = str(error).partition("\n\n")[0]  # a stack follows
        # Creating a job of other machines changes the transport of what is started later. A client that was started
        # before it listens on a UNIX socket, which other machines cannot reach.
        if start_client() == "unix" and monarch_transport() != "unix":
            cause += (
                "\nThis program's first component was started before the job was created, so that other machines "
                "cannot reach the program: create the job (SlurmJob, KubernetesJob, SSHJob) first"
            )
        raise Unrecoverable(f"{name}: {cause}") from None


def _slice_mesh(mesh: Mesh, number: int, size: int) -> Mesh:
    """Return part `number` of a mesh that is divided into parts of `size` ranks each, in the order of its ranks."""
    if mesh.size() == size:
        return mesh
    return mesh.flatten("part").slice(part=slice(number * size, (number + 1) * size))
