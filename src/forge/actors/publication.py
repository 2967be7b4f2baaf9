"""Publishing on demand, for loops like those of the torchforge documents, which never publish themselves:

    await trainer.train_step.call(batch)
    await policy.update_weights.fanout(version + 1)     # publishes the trainer's step first

The recipes call `push_weights`, so that this does nothing for them. It also publishes again a version whose only copy
was lost with its host.
"""

from __future__ import annotations

from ..runtime.controller import Service
from ..runtime.store import Store
from .identity import POLICY


def publish_by(store: Store, trainer: Service) -> None:
    """Let a store have this trainer publish a version that it does not hold."""
    store.publisher = trainer.publish_step.call


def publish_before_updates(store: Store, generators: Service) -> None:
    """Publish a version that the store does not hold before generators are updated to it."""

    async def publish(version: int) -> None:
        if store.publisher is not None and not store.exists(POLICY, version):
            await store.publisher(version)

    generators.before_fanout |= {"update_weights": publish, "update": publish}
