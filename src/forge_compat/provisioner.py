"""Start and end of a run by the names of the torchforge documents; neither has to be called.

await init_provisioner()      # the first component would do it
...
await shutdown()              # `forge.runtime.controller.run` does it, however the run ends
"""

from __future__ import annotations

from forge.runtime.controller.runtime import Runtime, runtime, shutdown

from .launcher import ProvisionerConfig

__all__ = ["init_provisioner", "shutdown"]


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
