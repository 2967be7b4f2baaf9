"""The `sandbox` section of a recipe."""

from __future__ import annotations

from pydantic import Field

from ...config import Section
from .sandbox import Sandbox


class SandboxConfig(Section):
    """Settings of `forge.envs.sandbox.Sandbox` ([sandbox.md](sandbox.md))."""

    level: str = "auto"
    workers: int = 2
    memory_mb: int = 512
    cpu_seconds: int = 10
    processes: int = 8
    file_mb: int = 16
    output_kb: int = 64
    imports: list[str] = Field(default_factory=list)
    path: list[str] = Field(default_factory=list)
    readable: list[str] = Field(default_factory=list)
    python: str | None = None
    allow_unsafe: bool = False

    def _check(self) -> None:
        self.open()

    def open(self) -> Sandbox:
        """Not started yet."""
        return Sandbox(**self)
