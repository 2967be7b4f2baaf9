"""State that survives a process: versioned weights, shared by the processes of a run, and journals.

The weight store as functions, `import forge.runtime.store as ts`, one store for all processes of a run:

    await ts.put("policy", model.state_dict(), version=3)
    await ts.get("policy", model.state_dict(), version=3)     # into any layout

A controller's first use creates the store; processes started afterwards find it through their environment. Reads and
writes run in a thread, so that the event loop stays free.
"""

from __future__ import annotations

import asyncio
import atexit
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...observability.metrics import PROCESS_NAME
from .errors import CorruptWeights, IncompleteVersion, MissingVersion, VersionConflict
from .journal import Journal
from .protocol import Store
from .transfer import Ranks
from .versions import ADDRESS, VersionStore

__all__ = [
    "CorruptWeights",
    "IncompleteVersion",
    "Journal",
    "MissingVersion",
    "Ranks",
    "Store",
    "VersionConflict",
    "VersionStore",
    "default_store",
    "delete",
    "exists",
    "get",
    "keys",
    "put",
    "use",
    "wait",
]

_store: VersionStore | None = None


def default_store() -> VersionStore:
    """Return the store of this run: the parent process's, or a new one that is removed with this process.

    Raises:
        RuntimeError: this process was started by a controller that had no store.
    """
    global _store
    address = os.environ.get(ADDRESS)
    if _store is not None and str(_store.root) == address and _store.root.is_dir():
        # A store that this process owns and has closed is replaced; the parent's is opened at its address.
        return _store
    if address and (_store is None or not _store.owned):
        _store = VersionStore(address)
    elif PROCESS_NAME in os.environ:
        raise RuntimeError(
            "this run has no store: have the controller call forge.runtime.store.default_store() at first"
        )
    else:
        _store = VersionStore.create()
        use(_store)
        atexit.register(_store.close)
    return _store


def use(store: VersionStore) -> None:
    """Make this the store of the run, also for processes started from now on."""
    global _store
    _store = store
    os.environ[ADDRESS] = str(store.root)


async def put(
    key: str,
    value: Tensor | Mapping[str, object],
    version: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    timeout: float = 300.0,
) -> int:
    """Publish a tensor, DTensor or state dict; see `VersionStore.put`."""
    return await asyncio.to_thread(default_store().put, key, value, version, dtype=dtype, timeout=timeout)


async def get(key: str, into: Any = None, version: int | None = None, *, timeout: float | None = None) -> Any:
    """Read a version, the newest by default, into any layout; see `Store.get`."""
    return await asyncio.to_thread(default_store().get, key, into, version, timeout=timeout)


async def exists(key: str, version: int | None = None) -> bool:
    """Whether a key has this version, or any."""
    return await asyncio.to_thread(default_store().exists, key, version)


async def delete(key: str) -> None:
    """Remove a key with all of its versions. MissingVersion: the key does not exist."""
    await asyncio.to_thread(default_store().delete, key)


async def keys(prefix: str = "") -> list[str]:
    """Return the keys that have a version, sorted."""
    return await asyncio.to_thread(default_store().keys, prefix)


async def wait(key: str, min_version: int = 0, *, timeout: float = 300.0) -> int:
    """Wait for a version of at least `min_version`; return the newest. TimeoutError: lists the existing ones."""
    return await asyncio.to_thread(default_store().wait, key, min_version, timeout=timeout)
