"""The weight store by TorchStore's names: `import forge.store as ts`.

    await ts.initialize()
    await ts.put_state_dict(model.state_dict(), "v0")
    await ts.get_state_dict("v0", user_state_dict=model.state_dict())

A value is in the memory of the host where it was put, and readers on that host map it: there are no volumes to place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from forge.runtime.store import *  # noqa: F403
from forge.runtime.store import MissingVersion
from forge_compat.values import STRUCTURE, decode, encode

from .default_store import default_store, release, use  # noqa: F401
from .store_calls import delete, exists, get, put, wait  # noqa: F401
from .store_calls import keys as list_keys


async def initialize(num_storage_volumes: int = 1, strategy: object = None, mesh: object = None) -> None:
    """Make the store of the run; the first use does it as well. The arguments are TorchStore's, and not used.

    Raises:
        RuntimeError: this process was started by a controller that has no store.
    """
    default_store()


async def shutdown() -> None:
    """Remove the store, if this process made it."""
    await asyncio.to_thread(release)


async def put_batch(entries: Mapping[str, Any]) -> None:
    """Put several values, one after the other."""
    for key, value in entries.items():
        await put(key, value)


async def get_batch(keys: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Read several keys: into the tensors of a mapping where it has them, else into new ones.

    Raises:
        MissingVersion: a key does not exist; nothing is read.
    """
    targets = keys if isinstance(keys, Mapping) else {}
    absent = [key for key in keys if not await exists(key)]
    if absent:
        raise MissingVersion(f"the store has no {', '.join(map(repr, absent))}; nothing was read")
    return {key: await get(key, targets.get(key)) for key in keys}


async def delete_batch(keys: Iterable[str]) -> None:
    """Remove several keys; those that do not exist are passed over, so that it may be repeated."""
    for key in keys:
        if await exists(key):
            await delete(key)


async def put_state_dict(state_dict: Mapping[str, Any], key: str, transfer_dtype: torch.dtype | None = None) -> None:
    """Publish a state dict, however nested, as one version: tensors, DTensors, and values beside them.

    Args:
        transfer_dtype: of floating-point tensors in the store.
    """
    await asyncio.to_thread(default_store().put, key, encode(state_dict), dtype=transfer_dtype)


async def get_state_dict(
    key: str, user_state_dict: dict[str, Any] | None = None, strict: bool = True
) -> dict[str, Any]:
    """Read the newest version of a state dict, into the tensors of another one of any layout, or into new ones.

    Args:
        user_state_dict: its tensors are filled in place; what was put is returned, with them in their places.
        strict: its tensors must be those that were put; false: those that both have are filled.

    Raises:
        KeyError: the key does not exist.
        ValueError: names or shapes differ.
    """
    return await asyncio.to_thread(_read, key, user_state_dict, strict)


def _read(key: str, target: dict[str, Any] | None, strict: bool) -> dict[str, Any]:
    with default_store().open(key) as snapshot:
        names = {*snapshot.manifest.by_name} - {STRUCTURE}
        tensors = {} if target is None else encode(target)
        tensors.pop(STRUCTURE, None)
        if target is not None and strict and names != tensors.keys():
            raise ValueError(
                f"{key}: the tensors {sorted(names ^ tensors.keys())[:3]} are in one of the state dicts alone: pass "
                "strict=False to read the others"
            )
        common = {name: tensors[name] for name in tensors if name in names}
        if common:
            snapshot.fill(common)
        rest = [name for name in snapshot.manifest.by_name if name not in common]
        value: dict[str, Any] = decode(snapshot.some(rest) | common)
        return value


keys = list_keys  # TorchStore's name, which is that of an argument above
