"""Meshes that a user made with Monarch, as the value of `Options.hosts`."""

from __future__ import annotations

from collections.abc import Mapping

from ..monarch_names import meshes_of
from ._monarch import HostMesh, ProcMesh


class UserMesh:
    """The value of `Options.hosts` besides numbers: a mesh, or several by name, of which a component gets one.

    Args:
        meshes: by name; the name is empty for a mesh that was handed over itself.
    """

    python_only = True  # no value in a file stands for it

    def __init__(self, meshes: Mapping[str, HostMesh | ProcMesh]) -> None:
        self.meshes = meshes

    @classmethod
    def wrap(cls, value: object) -> object:
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
        """Return the mesh, if it is one."""
        return next(iter(self.meshes.values())) if len(self.meshes) == 1 else None

    @property
    def procs(self) -> int | None:
        """Return number of processes of a ProcMesh; None of hosts."""
        return self.mesh.size() if isinstance(self.mesh, ProcMesh) else None

    def describe(self) -> str:
        """Describe it for a run's saved configuration and for errors."""
        if self.mesh is None:
            return f"a job with the meshes {', '.join(self.meshes)}"
        things = "processes" if isinstance(self.mesh, ProcMesh) else "hosts"
        return f"a {type(self.mesh).__name__} of {self.mesh.size()} {things}"

    def for_component(self, name: str) -> UserMesh:
        """Return the mesh of a component: the only one, or the one with its name. ValueError: there is none."""
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
        replicas = -(-num_replicas // per_process)

        if isinstance(self.mesh, ProcMesh):
            if replicas * procs != size:
                raise ValueError(
                    f"hosts is {self.describe()}, and num_replicas = {num_replicas} of procs = {procs} need "
                    f"{replicas * procs}: let the two agree, or omit procs to share the processes evenly"
                )
        # Fewer replicas than hosts have several hosts each, and divide their processes over these.
        elif replicas < size and (size % replicas or procs % (size // replicas)):
            raise ValueError(
                f"hosts is {self.describe()}, over which num_replicas = {num_replicas} of procs = {procs} cannot be "
                "divided evenly: change one of them, or hand over a slice of it"
            )
