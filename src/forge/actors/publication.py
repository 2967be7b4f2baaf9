"""Publish versions of weights on demand, for loops that never publish themselves, as in the torchforge documents:

    await trainer.train_step.call(batch)
    await policy.update_weights.fanout(version + 1)     # has the trainer publish its step first

The recipes publish by `push_weights`, and need this only for a version whose only copy was lost with its host: it is
published again.
"""

from typing import Any

from ..runtime.controller import Service, runtime
from ..runtime.store import Store, VersionStore
from .identity import POLICY


async def share_store(store: Store) -> Any:
    """Return a store that the processes on all machines of this run can use; `store` itself without other machines."""
    machines = runtime().placement.machines
    return store if machines is None or not isinstance(store, VersionStore) else await machines.share(store)


def connect_store(store: Any) -> Store | None:
    """Return a component's weight store for use in its process; connect it first if it was shared."""
    return store.connect() if hasattr(store, "connect") else store


def controller_store(store: Any) -> Store | None:
    """Return a component's weight store for use in the controller: the original store if it was shared."""
    return store.store if hasattr(store, "connect") else store


def publish_before_updates(store: Store, generators: Service, key: str = POLICY) -> None:
    """Make the trainer publish a version that the store does not have, before each update of generators to it."""

    async def publish_version(*args: int, **kwargs: int) -> None:
        (version,) = (*args, *kwargs.values())  # by any name
        if key in store.publishers and not store.exists(key, version):
            await store.publishers[key](version)

    generators.before_fanout |= {"update_weights": publish_version, "update": publish_version}
