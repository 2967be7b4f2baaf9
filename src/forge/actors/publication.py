"""Publishing on demand, for loops as in the torchforge documents, which never publish themselves:

    await trainer.train_step.call(batch)
    await policy.update_weights.fanout(version + 1)     # publishes the trainer's step first

The recipes call `push_weights`, so that this does nothing for them. It also publishes again a version whose only copy
was lost with its host.
"""

from typing import Any

from ..runtime.controller import Service, runtime
from ..runtime.store import Store, VersionStore
from .identity import POLICY


async def share_store(store: Store) -> Any:
    """Return a store that the processes on all machines of this run can use; without other machines the same."""
    machines = runtime().placement.machines
    return store if machines is None or not isinstance(store, VersionStore) else await machines.share(store)


def connect_store(store: Any) -> Store | None:
    """Resolve a component's store in its process: the store itself, or what was shared."""
    return store.connect() if hasattr(store, "connect") else store


def controller_store(store: Any) -> Store | None:
    """Resolve a component's store in the controller."""
    return store.store if hasattr(store, "connect") else store


def publish_by(store: Store, trainer: Service, key: str = POLICY) -> None:
    """Let a store have this trainer publish a version of a policy that it does not hold."""
    store.publishers = {**store.publishers, key: trainer.publish_step.call}


def publish_before_updates(store: Store, generators: Service, key: str = POLICY) -> None:
    """Publish a version of a policy that the store does not hold before generators are updated to it."""

    async def publish_version(version: int) -> None:
        if key in store.publishers and not store.exists(key, version):
            await store.publishers[key](version)

    generators.before_fanout |= {"update_weights": publish_version, "update": publish_version}
