"""The store of a run as functions: `import forge.store as ts`.

    await ts.put("policy", model.state_dict(), version=3)
    await ts.get("policy", model.state_dict(), version=3)     # into any layout

Reads and writes run in a thread, so that the event loop stays free. A key that is put again has another version;
readers of the last one keep what they have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .default_store import default_store
from .values import are_tensors, decode, encode


async def put(
    key: str,
    value: Tensor | Mapping[str, object] | Any,
    version: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    timeout: float = 300.0,
) -> int:
    """Publish a tensor, DTensor or state dict, see `VersionStore.put`, or anything that pickle carries; return its
    version. Every rank puts its part of a sharded value, and waits for the others."""
    stored = value if are_tensors(value) else encode(value)
    return await asyncio.to_thread(default_store().put, key, stored, version, dtype=dtype, timeout=timeout)


async def get(key: str, into: Any = None, version: int | None = None, *, timeout: float | None = None) -> Any:
    """Read a version, the newest by default, into any layout; see `Store.get`.

    Raises:
        MissingVersion: a KeyError; names the keys that exist.
        ValueError: the shapes do not fit.
    """
    value = await asyncio.to_thread(default_store().get, key, into, version, timeout=timeout)
    return decode(value) if into is None and isinstance(value, dict) else value


async def exists(key: str, version: int | None = None) -> bool:
    """Whether a key has this version, or any."""
    return await asyncio.to_thread(default_store().exists, key, version)


async def delete(key: str) -> None:
    """Remove a key with all of its versions. MissingVersion: the key does not exist."""
    await asyncio.to_thread(default_store().delete, key)


async def keys(prefix: str = "") -> list[str]:
    """Return the keys with this prefix that have a version, sorted."""
    return await asyncio.to_thread(default_store().keys, prefix)


async def wait(key: str, min_version: int = 0, *, timeout: float = 300.0) -> int:
    """Wait for a version of at least `min_version`; return the newest. TimeoutError: lists the existing ones."""
    return await asyncio.to_thread(default_store().wait, key, min_version, timeout=timeout)
