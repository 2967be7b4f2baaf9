"""The launcher's settings by the names of Meta's torchforge, for `forge.controller.provisioner.init_provisioner`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LauncherConfig:
    """Where processes are to run: `launcher` is None or "local" for this machine; other values are errors that say what
    does it here. The other settings are those of torchforge's launchers."""

    launcher: str | None = None
    job_name: str = ""
    services: Mapping[str, object] = field(default_factory=dict)
    actors: Mapping[str, object] = field(default_factory=dict)
    cpu: int | None = None
    memMB: int | None = None
    gpu: int | None = None
    account: str = ""
    qos: str = ""


@dataclass(frozen=True)
class ProvisionerConfig:
    """The settings of `init_provisioner`."""

    launcher_config: LauncherConfig
