"""The `sandbox` section of a recipe."""

from __future__ import annotations

from pydantic import Field

from ...config import Section
from .sandbox import Sandbox


class SandboxConfig(Section):
    """Settings of `forge.envs.sandbox.Sandbox` ([sandbox.md](sandbox.md))."""

    level: str = "auto"
    """`namespaces`, `landlock` or `bubblewrap`; `auto`: the first that holds here; `none` needs `allow_unsafe`."""
    workers: int = 2
    """Programs at once; each session has one of its own besides."""
    memory_mb: int = 512
    """Address space of a process, and memory of all of a program together."""
    cpu_seconds: int = 10
    """For a process, and for all of a program together."""
    processes: int = 8
    """Of a program, threads among them; at landlock all of them are threads."""
    file_mb: int = 16
    """Of all files that a program writes to /tmp; at landlock and bubblewrap it can write none."""
    output_kb: int = 64
    """Of each of stdout and stderr."""
    imports: list[str] = Field(default_factory=list)
    """Modules that are imported once for all programs."""
    path: list[str] = Field(default_factory=list)
    """Folders to import from, which programs may read."""
    readable: list[str] = Field(default_factory=list)
    """Further files and folders that programs may read."""
    python: str | None = None
    """The interpreter; null: the one that runs this."""
    allow_unsafe: bool = False
    """Allow the level `none`, also as the outcome of `auto`."""

    def _check(self) -> None:
        self.open()

    def open(self) -> Sandbox:
        """Not started yet."""
        return Sandbox(**self)
