"""Start and end of a run by the names of the torchforge documents, `forge.controller.provisioner`; neither has to be
called.

await init_provisioner()      # the first component would do it
...
await shutdown()              # `forge.runtime.controller.run` does it, however the run ends
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from forge.runtime.controller.runtime import Runtime, runtime, shutdown

__all__ = ["LauncherConfig", "ProvisionerConfig", "init_provisioner", "shutdown"]


@dataclass(frozen=True)
class LauncherConfig:
    """Where processes are to run: `launcher` is None or "local" for this machine; other values are errors that say what
    does it here. The other settings belong to torchforge's launchers."""

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


async def init_provisioner(config: ProvisionerConfig | None = None) -> Runtime:
    """Prepare this controller to start processes on its own host.

    Raises:
        ValueError: the configuration names a scheduler, which another command or a Monarch job is for.
    """
    launcher = None if config is None else config.launcher_config.launcher
    kind = str(getattr(launcher, "value", launcher) or "local")
    if kind != "local":
        raise ValueError(
            f"launcher = {kind} does nothing here: run `forge launch {kind} CONFIG`, or hand a Monarch job to each "
            "service, as in options(hosts=SlurmJob(meshes=...).state())"
        )
    return runtime()
