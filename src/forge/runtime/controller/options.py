"""Placement and supervision of a component: processes, replicas, hosts, devices, limits."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from ...config.sections import Section
from ..monarch_names import meshes_of
from ._monarch import HostMesh, ProcMesh
from .routers import resolve_router


class UserMesh:
    """User-provided value of `Options.hosts`: a Monarch mesh, or the meshes of a job, of which each component gets one.

    Args:
        meshes: the meshes by name; a mesh that was given without a job has the empty name.
    """

    python_only = True  # a YAML file cannot express it

    def __init__(self, meshes: Mapping[str, HostMesh | ProcMesh]) -> None:
        self.meshes = meshes

    @classmethod
    def wrap(cls, value: object) -> object:
        """Wrap a HostMesh, a ProcMesh or a job's state in a UserMesh; return any other value unchanged.

        Raises:
            ValueError: `value` is a job; its state is expected.
        """
        if isinstance(value, HostMesh | ProcMesh):
            return cls({"": value})
        if meshes := meshes_of(value):
            return cls(meshes)
        if type(value).__module__.startswith("monarch.") and callable(getattr(value, "state", None)):
            raise ValueError(f"hosts is a {type(value).__name__}: pass its state, hosts=job.state()")
        return value

    @property
    def mesh(self) -> HostMesh | ProcMesh | None:
        """Return the mesh if there is exactly one; None for a job of several."""
        return next(iter(self.meshes.values())) if len(self.meshes) == 1 else None

    @property
    def procs(self) -> int | None:
        """Return the number of processes of a single ProcMesh; None for a mesh of hosts, or several meshes."""
        return self.mesh.size() if isinstance(self.mesh, ProcMesh) else None

    def describe(self) -> str:
        """Return a description for a run's saved configuration and for errors, e.g. "a ProcMesh of 4 processes"."""
        if self.mesh is None:
            return f"a job with the meshes {', '.join(self.meshes)}"
        unit = "processes" if isinstance(self.mesh, ProcMesh) else "hosts"
        return f"a {type(self.mesh).__name__} of {self.mesh.size()} {unit}"

    def for_component(self, name: str) -> "UserMesh":
        """Return the mesh of the component `name`: the only mesh, or else the mesh that has this name.

        Raises:
            ValueError: there are several meshes and none has the name.
        """
        if self.mesh is not None:
            return self
        if name not in self.meshes:
            raise ValueError(
                f"hosts: the job has the meshes {', '.join(sorted(self.meshes))}, but not {name!r}: write "
                f"hosts=job.state().{min(self.meshes)}, or name the component after its mesh (mesh_name)"
            )
        return UserMesh({"": self.meshes[name]})

    def check(self, num_replicas: int, procs: int, per_process: int) -> None:
        """Check that the replicas divide the processes or hosts of the mesh evenly.

        Args:
            procs: processes of one replica.
            per_process: replicas that share one process.

        Raises:
            ValueError: they do not.
        """
        if self.mesh is None:
            return

        size = self.mesh.size()
        replicas = -(-num_replicas // per_process)  # rounded up: groups that share a process count once

        if isinstance(self.mesh, ProcMesh):
            if replicas * procs != size:
                raise ValueError(
                    f"hosts is {self.describe()}, and num_replicas = {num_replicas} of procs = {procs} need "
                    f"{replicas * procs} processes: change one of them, or omit procs to share the processes evenly"
                )
        # With fewer replicas than hosts each replica has several hosts, and divides its processes over them.
        elif replicas < size and (size % replicas or procs % (size // replicas)):
            raise ValueError(
                f"hosts is {self.describe()}, over which num_replicas = {num_replicas} of procs = {procs} cannot be "
                "divided evenly: change one of them, or pass a slice of the mesh"
            )


class Placement(Section):
    """Placement of one component of a run: its section under `services`."""

    procs: PositiveInt = 1
    """Processes of one replica; they form one torch.distributed group. Trainer and critic share the model over them as
    `parallelism` says, a generator by vLLM's tensor parallelism; other components have one."""
    num_replicas: PositiveInt = 1
    """Independent copies that calls are balanced over."""
    hosts: Annotated[int, Ge(1)] | UserMesh | None = None
    """Separate hosts for each replica, its processes divided over them; replicas of one process are spread over this
    many hosts instead. Null: the controller's own host. In Python also Monarch's HostMesh, ProcMesh or JobState."""
    host: str | None = None
    """HOST:PORT of the machine of `cluster.hosts` that it is placed on; null: any."""
    with_gpus: bool = False
    """Give each process its own GPUs."""
    share: str | None = None
    """Name of processes that several components live in together; null: separate processes."""
    share_procs: PositiveInt = 1
    """How many processes have that name. A component of as many has a rank in each of them; replicas of one process
    live in one each, in turn. With GPUs there is one for each of them."""
    threads: PositiveInt = 1
    """Compute threads of each process."""
    env: dict[str, str] = Field(default_factory=dict)
    """Additional environment variables of the processes."""
    memory_gb: Annotated[float, Ge(0.25)] | None = None
    """Limit on each process's private memory (RLIMIT_DATA), in GB, beyond which allocating fails. Without PyTorch
    a process needs a fifth of one, and does not start with less."""
    router: Any = "least_loaded"
    """How a replica is chosen for a routed call: `least_loaded`, `round_robin`, `prefix_affine`, or
    `package.module:function`; in Python also a function, see `forge.runtime.controller.routers`."""
    call_timeout: PositiveFloat = 1800.0
    """Seconds after which a call without an answer is an error."""
    max_restarts: NonNegativeInt = 5
    """Replacements in a row that fail, or die within ten seconds, before a replica is given up; 0: none is started."""

    @classmethod
    def canonical(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the settings with a mesh of Monarch's under `hosts` as a UserMesh.

        If `hosts` is a ProcMesh and `procs` is not set, `procs` becomes the replica's even share of its processes.
        """
        mesh = UserMesh.wrap(values.get("hosts"))
        if not isinstance(mesh, UserMesh):
            return values

        values = {**values, "hosts": mesh}
        replicas = values.get("num_replicas", 1)

        # `_check` reports a remainder, and a num_replicas that is not a positive integer.
        if mesh.procs is not None and "procs" not in values and isinstance(replicas, int) and replicas > 0:
            values["procs"] = max(1, mesh.procs // replicas)
        return values

    @property
    def host_count(self) -> int | None:
        """Return `hosts` if it is a number; None for the controller's own host and for a user's mesh."""
        return None if isinstance(self.hosts, UserMesh) else self.hosts

    @property
    def mesh(self) -> UserMesh | None:
        """Return `hosts` if it is a mesh that the user made; None otherwise."""
        return self.hosts if isinstance(self.hosts, UserMesh) else None

    @property
    def heavy(self) -> bool:
        """Return whether a replica holds resources that are released only at process exit: ranks or GPUs."""
        return self.procs > 1 or self.with_gpus

    @property
    def groups(self) -> int:
        """Return the number of units that are placed separately: here one for each replica."""
        return self.num_replicas

    def _check(self) -> None:
        resolve_router(self.router)

        for name, value in self.env.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"env: {name!r} = {value!r} is not a valid environment variable")

        # Settings without effect are mistakes: the user meant another one.
        if self.share is None and self.share_procs != 1:
            raise ValueError(
                f"share_procs = {self.share_procs} has no effect without share: set share, or omit share_procs"
            )

        # A shared process has one placement, which its first component decides.
        if self.share is not None and (self.procs not in (1, self.share_procs) or self.hosts):
            raise ValueError(
                f"a component that shares the process {self.share!r} must have procs 1 or {self.share_procs} "
                "(share_procs) and no hosts: set share to null to give it separate processes"
            )

        if self.host is not None and self.hosts is not None:
            raise ValueError(f"host = {self.host} and hosts = {self.hosts} cannot both be set: omit one")

        # A host that gets no process would be reserved for nothing, and Monarch's meshes cannot be divided unevenly.
        hosts = self.host_count
        if hosts is not None and self.procs == 1 and self.groups < hosts:
            raise ValueError(
                f"hosts = {hosts} is more than num_replicas = {self.num_replicas} can use: lower hosts, raise "
                "num_replicas, or raise procs to spread one replica"
            )

        if hosts is not None and self.procs > 1 and self.procs % hosts:
            raise ValueError(f"procs = {self.procs} cannot be divided evenly over hosts = {hosts}")


class Options(Placement):
    """Placement and supervision of one component: the arguments of `options(...)` in Python."""

    gpus_per_proc: PositiveInt = 1
    """How many, with `with_gpus`."""
    mesh_name: str | None = None
    """What the component is called in errors, metrics and status; null: its class."""
    per_process: PositiveInt = 1
    """Light replicas that live together in one process."""
    setup_timeout: PositiveFloat = 300.0
    """The same for the component's start."""
    ping_timeout: PositiveFloat = 4.0
    """Seconds without an answer to a ping after which a replica counts as hung and is replaced."""
    stall_after: PositiveFloat = 60.0
    """Seconds without an answer to any call after which it is logged who waits for whom, with stacks; a component that
    is starting has a line without them until half of `setup_timeout`."""
    max_in_flight: PositiveInt = 1024
    """Most calls at one replica at a time; additional callers wait."""
    retries: NonNegativeInt = 4
    """How often a call is sent again because its replica was lost."""
    quarantine_after: PositiveInt = 2
    """Replicas that one call may take down before it is an error."""

    def on_mesh_of(self, component: str) -> "Options":
        """Return the options with one mesh as `hosts`: of a job's meshes the one that is named after the component.

        Raises:
            ValueError: the job has no mesh of this name.
        """
        mesh = self.mesh and self.mesh.for_component(self.mesh_name or component)
        return self if mesh is self.mesh else Options(**{**self, "hosts": mesh})

    @property
    def groups(self) -> int:
        """Return the number of units that are placed separately: here groups of `per_process` replicas in a process."""
        return -(-self.num_replicas // self.per_process)  # rounded up

    def _check(self) -> None:
        super()._check()
        if self.gpus_per_proc != 1 and not self.with_gpus:
            raise ValueError(
                f"gpus_per_proc = {self.gpus_per_proc} has no effect without GPUs: set with_gpus to true, or omit it"
            )
        if self.per_process > 1 and (self.procs > 1 or self.with_gpus or self.share is not None):
            raise ValueError(
                "per_process above 1 (several replicas in one process) needs procs 1, with_gpus false and no share"
            )

        mesh = self.mesh
        if mesh is None:
            return

        # The processes of a ProcMesh run already: what takes effect when a process starts comes too late for them.
        ignored = [name for name in ("env", "threads", "memory_gb") if mesh.procs is not None and self.differs(name)]
        if ignored:
            raise ValueError(
                f"{ignored[0]} has no effect, because hosts is {mesh.describe()}, which run already: omit it, or use "
                "spawn_procs(bootstrap=...)"
            )
        mesh.check(self.num_replicas, self.procs, self.per_process)


def snake_case(name: str) -> str:
    """Return the default name of a component, which is the name of its class in snake case.

    >>> snake_case("ReplayBuffer")
    'replay_buffer'
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


ServiceConfig = Options  # the name in the torchforge documents
