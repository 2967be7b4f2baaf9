"""What the `sandbox` section of a recipe can be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...config import ConfigError, Section
from .sandbox import Sandbox


@dataclass
class SandboxConfig(Section):
    """See `forge.envs.sandbox.Sandbox`."""

    level: str = "auto"
    workers: int = 2
    memory_mb: int = 512
    cpu_seconds: int = 10
    processes: int = 8
    file_mb: int = 16
    output_kb: int = 64
    imports: list[str] = field(default_factory=list)
    path: list[str] = field(default_factory=list)
    readable: list[str] = field(default_factory=list)
    python: str | None = None
    allow_unsafe: bool = False

    def validate(self) -> None:
        try:
            self.open()
        except ValueError as error:
            raise ConfigError(f"sandbox: {error}") from None

    def open(self) -> Sandbox:
        """Not started yet."""
        return Sandbox(**self)
