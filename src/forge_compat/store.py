"""The weight store by TorchStore's names: `import forge.store as ts`.

    await ts.initialize()
    await ts.put_state_dict(model.state_dict(), "v0")
    await ts.get_state_dict("v0", user_state_dict=model.state_dict())

A value is in the memory of the host where it was put, and readers on that host map it: there are no volumes to place.
All processes of a controller share the store without passing it along. Reads and writes run in a thread, so that the
event loop stays free. A key that is put again has another version; readers of the last one keep what they have.
"""

import asyncio
import atexit
import os
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from forge.observability.metrics import PROCESS_NAME
from forge.runtime.names import STORE as ADDRESS
from forge.runtime.store import *  # noqa: F403
from forge.runtime.store import MissingVersion
from forge.runtime.store.versions import PREFIX, VersionStore, memory_folder
from forge.system.scratch import MACHINE

# The tensor, of bytes, that has everything but the tensors.
STRUCTURE = "__structure__"


@dataclass(frozen=True, slots=True)
class Leaf:
    """The place of a tensor in a structure."""

    name: str


def are_tensors(value: object) -> bool:
    """Return whether a value is a tensor, or a mapping of names to such, which a store holds as it is.

    >>> are_tensors({"a": 1})
    False
    """
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(name, str) and are_tensors(part) for name, part in value.items())
    return isinstance(value, Tensor)


def encode(value: object) -> dict[str, Tensor]:
    """Return the tensors of a value by dotted names, and the structure around them.

    Raises:
        ValueError: two tensors have the same name.
        pickle.PicklingError, AttributeError, TypeError: a part without tensors cannot be pickled.
    """
    tensors: dict[str, Tensor] = {}

    # Sharded tensors stay tensors, which each rank writes its part of; only what surrounds them is pickled.
    def visit_part(path: str, part: Any) -> Any:
        if isinstance(part, Tensor):
            name = path or "value"
            if name in tensors or name == STRUCTURE:
                raise ValueError(f"two tensors have the name {name!r}")
            tensors[name] = part
            return Leaf(name)
        if isinstance(part, Mapping):
            return {name: visit_part(f"{path}.{name}" if path else str(name), child) for name, child in part.items()}
        if type(part) in (list, tuple):
            children = enumerate(part)
            return type(part)(visit_part(f"{path}.{index}" if path else str(index), child) for index, child in children)
        return part

    # By value where a class is a program's own or a function's: readers may not be able to import it.
    encoded = cloudpickle.dumps(visit_part("", value))
    return tensors | {STRUCTURE: torch.from_numpy(np.frombuffer(encoded, np.uint8).copy())}


def decode(tensors: Mapping[str, Tensor]) -> Any:
    """Return the value of `encode`, from all of its tensors; those without a structure are returned as they are."""
    if STRUCTURE not in tensors:
        return dict(tensors)

    def fill_structure(structure: Any) -> Any:
        if isinstance(structure, Leaf):
            return tensors[structure.name]
        if isinstance(structure, dict):
            return {name: fill_structure(child) for name, child in structure.items()}
        if type(structure) in (list, tuple):
            return type(structure)(map(fill_structure, structure))
        return structure

    # Of a process of this run: the store's folder is its user's only.
    return fill_structure(pickle.loads(tensors[STRUCTURE].numpy().tobytes()))


MARK = "default"  # a file in the folder of the store that child processes share

_store: VersionStore | None = None


def default_store() -> VersionStore:
    """Return the store of this run: the parent process's, or a new one that is removed with this process.

    A process finds the store in its environment, or, if it was started before the store, by the ids of the processes
    that it descends from.

    Raises:
        RuntimeError: this process was started by a controller that has no store.
    """
    address = os.environ.get(ADDRESS)
    if _store is not None and str(_store.root) == address and _store.root.is_dir():
        return _store
    # A store that this process owns and has closed is replaced; the parent's is opened at its address.
    address = None if _store is not None and _store.owned else address or _address_of_ancestor()
    if address:
        return use(VersionStore(address))
    if PROCESS_NAME in os.environ:
        raise RuntimeError("this run has no store: have the controller call forge.store.initialize() at first")
    store = VersionStore.create()
    (store.root / MARK).touch()
    atexit.register(store.close)
    return use(store)


def use(store: VersionStore) -> VersionStore:
    """Make this the store of the run, also for processes started from now on."""
    global _store
    _store = store
    os.environ[ADDRESS] = str(store.root)
    return store


def release() -> None:
    """Remove the store of the run if this process made it; another process's is only forgotten."""
    global _store
    if _store is not None:
        if _store.owned:
            _store.close()
        if os.environ.get(ADDRESS) == str(_store.root):
            del os.environ[ADDRESS]
    # The next use makes or finds another one.
    _store = None


def _address_of_ancestor() -> str | None:
    process = os.getppid()
    while process > 1:
        for folder in memory_folder().glob(f"{PREFIX}{process}-{MACHINE}-*"):
            # Another user's folder could have values of theirs in it.
            if (folder / MARK).exists() and folder.lstat().st_uid == os.geteuid():
                return str(folder)
        # The name, in brackets, may have blanks.
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return None


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
    """Return whether a key has this version, or any."""
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
    """Publish a state dict, however nested, as one version: tensors, DTensors, and values alongside them.

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
    return await asyncio.to_thread(_read_version, key, user_state_dict, strict)


def _read_version(key: str, target: dict[str, Any] | None, strict: bool) -> dict[str, Any]:
    with default_store().open(key) as snapshot:
        names = {*snapshot.manifest.by_name} - {STRUCTURE}
        tensors = {} if target is None else encode(target)
        tensors.pop(STRUCTURE, None)

        if target is not None and strict and names != tensors.keys():
            raise ValueError(
                f"{key}: the tensors {sorted(names ^ tensors.keys())[:3]} are in one of the state dicts only: pass "
                "strict=False to read the others"
            )

        common = {name: tensors[name] for name in tensors if name in names}
        if common:
            snapshot.fill(common)
        rest = [name for name in snapshot.manifest.by_name if name not in common]
        value: dict[str, Any] = decode(snapshot.some(rest) | common)
        return value
