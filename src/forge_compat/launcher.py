"""Start and end of a run by torchforge's names, in `forge.controller.provisioner`. A program need not call them.

await init_provisioner()      # the first component would do it
...
await shutdown()              # `forge.runtime.controller.run` does it, however the run ends
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forge.runtime.controller.runtime import runtime, shutdown

__all__ = ["LauncherConfig", "ProvisionerConfig", "init_provisioner", "shutdown"]


@dataclass(frozen=True)
class LauncherConfig:
    """torchforge's settings of a launcher.

    `launcher` must be None or "local", for this machine. The others are accepted and not used.
    """

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


class Provisioner:
    """torchforge's provisioner, for programs that ask it for hosts."""

    def get_host_mesh(self, name: str) -> Any:
        """Return Monarch's mesh of this host, whatever the name of the component."""
        from monarch.actor import this_host

        return this_host()


async def init_provisioner(config: ProvisionerConfig | None = None) -> Provisioner:
    """Prepare this controller to start processes on its own host, and return torchforge's provisioner.

    Raises:
        ValueError: the configuration names a scheduler; the message says how to use one here.
    """
    launcher = None if config is None else config.launcher_config.launcher
    kind = str(getattr(launcher, "value", launcher) or "local")
    if kind != "local":
        raise ValueError(
            f"launcher = {kind} is not supported in a script: run `forge launch {kind} CONFIG`, or pass a Monarch job "
            "to each service, as in options(hosts=SlurmJob(meshes=...).state())"
        )
    runtime()
    return Provisioner()
