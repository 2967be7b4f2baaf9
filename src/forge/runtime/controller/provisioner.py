"""Start and end of a run by the names of the torchforge documents; neither has to be called.

await init_provisioner()      # the first component would do it
...
await shutdown()              # `forge.runtime.controller.run` does it, however the run ends
"""

from __future__ import annotations

from .runtime import Runtime, runtime, shutdown

__all__ = ["init_provisioner", "shutdown"]


async def init_provisioner() -> Runtime:
    """Prepare this controller to start processes on its own host."""
    return runtime()
