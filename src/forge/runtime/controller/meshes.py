"""Meshes that a user made with Monarch, as the value of `Options.hosts`."""

from __future__ import annotations

from collections.abc import Mapping

from ..monarch_names import meshes_of
from ._monarch import HostMesh, ProcMesh


class UserMesh:
    """A value of `Options.hosts`: a mesh of Monarch's, or the meshes of a job, of which each component gets one.

    Args:
        meshes: the meshes by name; a mesh that was given without a job has the empty name.
    """

    python_only = True  # a YAML file cannot express it

    def __init__(self, meshes: Mapping[str, HostMesh | ProcMesh]) -> None:
        self.meshes = meshes

    @classmethod
    def wrap(cls, value: object) -> object:
        """Return a UserMesh of a HostMesh, a ProcMesh or a job's state; return any other value as it is.

        Raises:
            ValueError: `value` is a job; its state is expected.
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

    def for_component(self, name: str) -> UserMesh:
        """Return the mesh of the component `name`: the only mesh, or else the mesh that has this name.

        Raises:
            ValueError: there are several meshes and none has the name.
        """
        if self.mesh is not None:
            return self
        if name not in self.meshes:
            raise ValueError(
                f"hosts: the job has the meshes {', '.join(sorted(self.meshes))}, none of them {name!r}: write "
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
                    f"{replicas * procs}: let the two agree, or omit procs to share the processes evenly"
                )
        # With fewer replicas than hosts each replica has several hosts, and divides its processes over them.
        elif replicas < size and (size % replicas or procs % (size // replicas)):
            raise ValueError(
                f"hosts is {self.describe()}, over which num_replicas = {num_replicas} of procs = {procs} cannot be "
                "divided evenly: change one of them, or hand over a slice of it"
            )
