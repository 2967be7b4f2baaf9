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

STRUCTURE = "__structure__"  # name of a tensor of bytes: the pickled value without its tensors


@dataclass(frozen=True, slots=True)
class Leaf:
    """Placeholder for the tensor with this name in the pickled structure of a value."""

    name: str


def are_tensors(value: object) -> bool:
    """Return whether a value is a tensor or a nested mapping of names to tensors, which the store takes without pickle.

    >>> are_tensors({"a": 1})
    False
    """
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(name, str) and are_tensors(part) for name, part in value.items())
    return isinstance(value, Tensor)


def encode(value: object) -> dict[str, Tensor]:
    """Return the tensors of a value by dotted names, and under STRUCTURE the pickled rest of it; `decode` undoes this.

    Raises:
        ValueError: two tensors have the same name.
        pickle.PicklingError, AttributeError, TypeError: a part without tensors cannot be pickled.
    """
    tensors: dict[str, Tensor] = {}

    # Tensors are not pickled, so that each rank can write its part of a sharded one.
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

    # cloudpickle stores classes of the main program by value, as readers may not be able to import them.
    encoded = cloudpickle.dumps(visit_part("", value))
    return tensors | {STRUCTURE: torch.from_numpy(np.frombuffer(encoded, np.uint8).copy())}


def decode(tensors: Mapping[str, Tensor]) -> Any:
    """Return the value whose tensors `encode` returned; tensors without a structure are returned as a dict."""
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

    # Unpickling is safe: only processes of this user can write to the store.
    return fill_structure(pickle.loads(tensors[STRUCTURE].numpy().tobytes()))


MARK = "default"  # a file in the folder of a run's store, by which child processes find it

_store: VersionStore | None = None


def default_store() -> VersionStore:
    """Return the store of this run: the parent process's, or a new one that is removed when this process ends.

    The address of a parent's store is in the environment; if this process is older than the store, it is found by the
    ids of the parent processes.

    Raises:
        RuntimeError: this process was started by a controller that has no store.
    """
    address = os.environ.get(ADDRESS)
    if _store is not None and str(_store.root) == address and _store.root.is_dir():
        return _store
    # A store that this process owned and has closed is replaced by a new one, any other is opened at its address.
    address = None if _store is not None and _store.owned else address or _address_of_ancestor()
    if address:
        return use(VersionStore(address))
    if PROCESS_NAME in os.environ:
        raise RuntimeError("this run has no store: call forge.store.initialize() in the controller first")
    store = VersionStore.create()
    (store.root / MARK).touch()
    atexit.register(store.close)
    return use(store)


def use(store: VersionStore) -> VersionStore:
    """Set a store as the store of the run, also for processes that are started later, and return it."""
    global _store
    _store = store
    os.environ[ADDRESS] = str(store.root)
    return store


def release() -> None:
    """Release the store of the run, and remove it if this process created it; the next use creates or finds another
    store."""
    global _store
    if _store is not None:
        if _store.owned:
            _store.close()
        if os.environ.get(ADDRESS) == str(_store.root):
            del os.environ[ADDRESS]
    _store = None


def _address_of_ancestor() -> str | None:
    process = os.getppid()
    while process > 1:
        for folder in memory_folder().glob(f"{PREFIX}{process}-{MACHINE}-*"):
            # A folder of another user is not trusted.
            if (folder / MARK).exists() and folder.lstat().st_uid == os.geteuid():
                return str(folder)
        # The parent's id follows the name, which is in parentheses and may contain spaces.
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
    """Publish a value, and return its version number, see `VersionStore.put`.

    Every rank puts its part of a sharded value, and waits for the others.

    Args:
        value: a tensor, a DTensor, a state dict, or anything that pickle can store.
    """
    stored = value if are_tensors(value) else encode(value)
    return await asyncio.to_thread(default_store().put, key, stored, version, dtype=dtype, timeout=timeout)


async def get(key: str, into: Any = None, version: int | None = None, *, timeout: float | None = None) -> Any:
    """Return the value of a version, by default the newest, or read it into tensors of any layout, see `Store.get`.

    Raises:
        MissingVersion: there is none; a KeyError whose message lists the keys that exist.
        ValueError: the shapes do not fit.
    """
    value = await asyncio.to_thread(default_store().get, key, into, version, timeout=timeout)
    return decode(value) if into is None and isinstance(value, dict) else value


async def exists(key: str, version: int | None = None) -> bool:
    """Return whether a key has this version, or with None any version."""
    return await asyncio.to_thread(default_store().exists, key, version)


async def delete(key: str) -> None:
    """Remove a key with all of its versions. MissingVersion: the key does not exist."""
    await asyncio.to_thread(default_store().delete, key)


async def keys(prefix: str = "") -> list[str]:
    """Return the keys that start with a prefix and have a version, sorted."""
    return await asyncio.to_thread(default_store().keys, prefix)


async def wait(key: str, min_version: int = 0, *, timeout: float = 300.0) -> int:
    """Wait for a version of at least `min_version`; return the newest. TimeoutError: none came in `timeout` seconds."""
    return await asyncio.to_thread(default_store().wait, key, min_version, timeout=timeout)


class LocalRankStrategy:
    """One of TorchStore's strategies of placement, which `initialize` accepts: values are on the host of their put."""


ControllerStorageVolumes = HostStrategy = LocalRankStrategy


async def initialize(num_storage_volumes: int = 1, strategy: object = None, mesh: object = None) -> None:
    """Create the store of the run; TorchStore's arguments are accepted and ignored.

    Raises:
        RuntimeError: this process was started by a controller that has no store.
    """
    default_store()


async def shutdown() -> None:
    """Remove the store of the run if this process made it."""
    await asyncio.to_thread(release)


async def put_batch(entries: Mapping[str, Any]) -> None:
    """Put several values by their keys, one after the other."""
    for key, value in entries.items():
        await put(key, value)


async def get_batch(keys: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the newest values of several keys, by key.

    Args:
        keys: if it is a mapping, each value is read into the tensors that it has for the key.

    Raises:
        MissingVersion: a key does not exist; nothing is read.
    """
    targets = keys if isinstance(keys, Mapping) else {}
    absent = [key for key in keys if not await exists(key)]
    if absent:
        raise MissingVersion(f"the store has no {', '.join(map(repr, absent))}; nothing was read")
    return {key: await get(key, targets.get(key)) for key in keys}


async def delete_batch(keys: Iterable[str]) -> None:
    """Remove several keys; those that do not exist are skipped, so that it may be repeated."""
    for key in keys:
        if await exists(key):
            await delete(key)


async def put_state_dict(state_dict: Mapping[str, Any], key: str, transfer_dtype: torch.dtype | None = None) -> None:
    """Publish a state dict, nested to any depth, as one version; it may contain values that are no tensors.

    Args:
        transfer_dtype: of floating-point tensors in the store; None to keep theirs.
    """
    await asyncio.to_thread(default_store().put, key, encode(state_dict), dtype=transfer_dtype)


async def get_state_dict(
    key: str, user_state_dict: dict[str, Any] | None = None, strict: bool = True
) -> dict[str, Any]:
    """Return the newest version of a state dict.

    Args:
        user_state_dict: its tensors, sharded in any way, are filled in place and are part of what is returned.
        strict: its tensors must have the names of those that were put; if False, those with a common name are filled.

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
                f"{key}: the tensors {sorted(names ^ tensors.keys())[:3]} are in only one of the two state dicts: "
                "pass strict=False to read the common ones"
            )

        common = {name: tensors[name] for name in tensors if name in names}
        if common:
            snapshot.fill(common)
        others = [name for name in snapshot.manifest.by_name if name not in common]
        return decode(snapshot.some(others) | common)
