"""The store of a run as functions, by the names and with the arguments of TorchStore: `import forge.store as ts`.

    await ts.initialize()
    await ts.put_state_dict(model.state_dict(), "v0")
    await ts.get_state_dict("v0", user_state_dict=model.state_dict())

Reads and writes run in a thread, so that the event loop stays free. A key that is put again has another version;
readers of the last one keep what they have. `v0/0.weight` reads a part of the state dict `v0`. `store_name` keeps keys
apart; all names live in one store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...observability.console import configure_logging
from . import default
from .deferred import is_sharded, put_deferred, wait_for_put, whole
from .errors import MissingVersion
from .parts import DELIMITER, find_part, part_names, possible_parts, read_part
from .strategies import TorchStoreStrategy
from .transfer import RankPart
from .values import STATE_DICT, STRUCTURE, STRUCTURES, TensorSlice, are_tensors, decode, encode, has_parts

DEFAULT_NAME = "torchstore"
PATIENCE = 300.0  # seconds that a put waits for other ranks
# Before the name of a store and after it, in its keys: a character that is not on keyboards.
SEPARATOR = "\x1f"
DELIMITERS = (".", "/")  # between the parts of a key


async def initialize(
    num_storage_volumes: int = 1,
    strategy: TorchStoreStrategy | None = None,
    store_name: str = DEFAULT_NAME,
    mesh: object = None,
) -> None:
    """Make the store of the run. The first use does it as well; processes started before find it, too.

    Args:
        num_storage_volumes, strategy, mesh: accepted for programs of TorchStore: values are in the memory of the host
            where they are put, so that there are no volumes to place.
        store_name: of a part whose keys are apart.

    Raises:
        TypeError: the strategy is none of `forge.store`.
        RuntimeError: this process was started by a controller that has no store.
    """
    if strategy is not None and not isinstance(strategy, TorchStoreStrategy):
        raise TypeError(f"strategy must be one of forge.store, such as LocalRankStrategy(), got {strategy!r}")
    default.default_store()


async def shutdown(store_name: str = DEFAULT_NAME) -> None:
    """Remove the store, if this process made it, or the keys of another `store_name`."""
    if store_name == DEFAULT_NAME:
        await asyncio.to_thread(default.release)
    else:
        await delete_batch(await keys(store_name=store_name), store_name=store_name)


async def put(
    key: str,
    value: Tensor | Mapping[str, object] | Any,
    version: int | None = None,
    *,
    store_name: str = DEFAULT_NAME,
    dtype: torch.dtype | None = None,
    timeout: float | None = None,
) -> int | None:
    """Publish a tensor, DTensor or state dict, see `VersionStore.put`, or anything that pickle carries; return its
    version.

    Every rank puts its part of a sharded value. As in TorchStore, no rank waits for the others: the last one publishes,
    and until then a version does not exist and None is returned. A rank's next use of the key waits for its put. A
    DTensor that one rank has all of is put by this rank alone.

    Args:
        version: its number; a put with a number waits for the other ranks.
        timeout: seconds to wait for the other ranks, then IncompleteVersion is raised; None without a number waits in
            the background, and logs the ranks that are absent after 300.
    """
    name = STATE_DICT if has_parts(value) else STRUCTURE
    stored = value if are_tensors(value) else encode(value, name)
    return await _publish(_key(key, store_name), stored, version, dtype, timeout)


async def put_batch(entries: Mapping[str, Any], store_name: str = DEFAULT_NAME) -> None:
    """Put several values, one after the other. ValueError: there are none."""
    if not isinstance(entries, Mapping) or not entries:
        raise ValueError(f"put_batch needs a mapping of at least one key to its value, got {entries!r:.80}")
    for key, value in entries.items():
        await put(key, value, store_name=store_name)


async def get(
    key: str,
    into: Any = None,
    version: int | TensorSlice | None = None,
    *,
    inplace_tensor: Tensor | None = None,
    tensor_slice_spec: TensorSlice | None = None,
    store_name: str = DEFAULT_NAME,
    timeout: float | None = None,
) -> Any:
    """Read a version, the newest by default, into any layout; see `Store.get`.

    Args:
        inplace_tensor: TorchStore's name of `into`.
        tensor_slice_spec: a block, which is returned, or read into a plain tensor of its shape; may be third, as in
            TorchStore.

    Raises:
        MissingVersion: a KeyError; names the keys that exist.
        ValueError: the shapes do not fit, or a block is of a state dict.
    """
    # The third argument is a version here, and a block there.
    target = into if inplace_tensor is None else inplace_tensor
    block = version if isinstance(version, TensorSlice) else tensor_slice_spec
    number = None if isinstance(version, TensorSlice) else version
    store = default.default_store()
    name = _key(key, store_name)
    await _wait_for_puts(name)
    part = await asyncio.to_thread(find_part, store, name, number)
    if part is not None:
        box = None if block is None else block.box
        return await asyncio.to_thread(read_part, store, part, target, box, number)
    if block is not None:
        return await asyncio.to_thread(_read_block, name, block, target, number)
    value = await asyncio.to_thread(store.get, name, target, number, timeout=timeout)
    return decode(value) if target is None and isinstance(value, dict) else value


async def get_batch(
    keys: Iterable[str] | Mapping[str, Tensor | None], store_name: str = DEFAULT_NAME
) -> dict[str, Any]:
    """Read several keys, all or none: into the tensors of a mapping where it has them, else into new ones.

    Raises:
        KeyError: a key does not exist; nothing is read.
        ValueError: there are no keys, one comes twice, or a tensor of the mapping has another shape; nothing is read.
        TypeError: a single string.
    """
    _check_keys("get_batch", keys)
    names = list(keys)
    if not names or len({*names}) < len(names):
        raise ValueError(f"get_batch needs keys, each once, got {names}")
    # Looked for first, so that no tensor of the caller is filled if one key is absent.
    absent = [name for name in names if not await exists(name, store_name=store_name)]
    if absent:
        raise MissingVersion(f"the store has no {', '.join(map(repr, absent))}; nothing was read")
    targets = keys if isinstance(keys, Mapping) else {}
    for name, target in targets.items():
        if target is not None:
            await asyncio.to_thread(_check_target, _key(name, store_name), target)
    return {name: await get(name, targets.get(name), store_name=store_name) for name in names}


async def put_state_dict(
    state_dict: Mapping[str, Any] | None,
    key: str,
    store_name: str = DEFAULT_NAME,
    direct_rdma: bool = False,
    transfer_dtype: torch.dtype | None = None,
) -> None:
    """Publish a state dict, however nested, as one version: tensors, DTensors, and values beside them.

    Args:
        direct_rdma: accepted: there is one copy in any case, into memory that readers on the host map.
        transfer_dtype: of floating-point tensors in the store.

    Raises:
        ValueError: the state dict is None, which TorchStore takes with direct_rdma.
    """
    if state_dict is None:
        raise ValueError(f"put_state_dict of {key!r} needs the state dict each time: nothing is registered beforehand")
    await _publish(_key(key, store_name), encode(state_dict, STATE_DICT), dtype=transfer_dtype)


async def get_state_dict(
    key: str,
    user_state_dict: dict[str, Any] | None = None,
    strict: bool = True,
    store_name: str = DEFAULT_NAME,
    direct_rdma: bool = False,
) -> dict[str, Any]:
    """Read the newest version of a state dict, into the tensors of another one of any layout, or into new ones.

    Args:
        user_state_dict: its tensors are filled in place, all or none. What was put is returned, with these tensors in
            their places.
        strict: its tensors must be those that were put; false: those that both have are filled.
        direct_rdma: accepted, see `put_state_dict`; needs a user_state_dict.

    Raises:
        KeyError: the key does not exist.
        ValueError: names or shapes differ; or direct_rdma without a user_state_dict.
    """
    if direct_rdma and user_state_dict is None:
        raise ValueError("get_state_dict with direct_rdma needs a user_state_dict, whose tensors are filled")
    await wait_for_put(_key(key, store_name))
    value = await asyncio.to_thread(_read_state_dict, _key(key, store_name), user_state_dict, strict)
    # As TorchStore returns it in each case.
    return user_state_dict if direct_rdma and user_state_dict is not None else value


async def exists(key: str, version: int | None = None, *, store_name: str = DEFAULT_NAME) -> bool:
    """Whether a key has this version, or any; of a part of a state dict, whether that has it."""
    name = _key(key, store_name)
    store = default.default_store()
    await _wait_for_puts(name)
    if await asyncio.to_thread(store.exists, name, version):
        return True
    return await asyncio.to_thread(find_part, store, name, version) is not None


async def delete(key: str, *, store_name: str = DEFAULT_NAME) -> None:
    """Remove a key with all of its versions.

    Raises:
        MissingVersion: the key does not exist.
        ValueError: it is a part of a state dict, which is removed as a whole.
    """
    name = _key(key, store_name)
    store = default.default_store()
    await _wait_for_puts(name)
    part = await asyncio.to_thread(find_part, store, name)
    if part is not None:
        owner = part.key.removeprefix(_key("", store_name))
        raise ValueError(f"{key!r} is a part of the state dict {owner!r}, which is deleted as a whole")
    await asyncio.to_thread(store.delete, name)


async def delete_batch(keys: Iterable[str], *, store_name: str = DEFAULT_NAME) -> None:
    """Remove several keys; those that do not exist are passed over, so that it may be repeated.

    Raises:
        TypeError: a single string.
    """
    _check_keys("delete_batch", keys)
    for key in keys:
        try:
            await delete(key, store_name=store_name)
        except MissingVersion:
            continue


async def keys(prefix: str | None = None, *, store_name: str = DEFAULT_NAME) -> list[str]:
    """Return the keys that have a version, sorted: all, or with the parts of state dicts those under `prefix`.

    A prefix ends at a dot or a slash, as TorchStore's does: "v1" has "v1", "v1.weight" and "v1/weight", not "v10".
    """
    base = _key("", store_name)
    names = await asyncio.to_thread(default.default_store().keys, base)
    names = [name.removeprefix(base) for name in names if SEPARATOR not in name.removeprefix(base)]
    if prefix is None:
        return names
    owners = [name for name in names if is_under(name, prefix) or prefix.startswith(f"{name}{DELIMITER}")]
    parts = await asyncio.to_thread(_parts_of, owners, base)
    return sorted(name for name in {*owners, *parts} if is_under(name, prefix))


def is_under(key: str, prefix: str) -> bool:
    """Whether the first parts of a key, which dots and slashes separate, are those of a prefix."""
    # TorchStore keeps its keys in a tree by these delimiters, so a prefix is a node of it.
    following = key.removeprefix(prefix)[:1]
    return key == prefix or (key.startswith(prefix) and (prefix[-1:] in DELIMITERS or following in DELIMITERS))


async def wait(key: str, min_version: int = 0, *, store_name: str = DEFAULT_NAME, timeout: float = 300.0) -> int:
    """Wait for a version of at least `min_version`; return the newest. TimeoutError: lists the existing ones."""
    return await asyncio.to_thread(default.default_store().wait, _key(key, store_name), min_version, timeout=timeout)


@dataclass(frozen=True)
class Client:
    """The functions of this module as methods, for one store name: `(await client()).put("a", tensor)`."""

    store_name: str = DEFAULT_NAME

    def __getattr__(self, name: str) -> Any:
        if name not in CLIENT_CALLS:
            raise AttributeError(f"a client has no {name!r}; it has {', '.join(CLIENT_CALLS)}")
        return partial(CLIENT_CALLS[name], store_name=self.store_name)


CLIENT_CALLS = {
    call.__name__: call
    for call in (put, put_batch, get, get_batch, put_state_dict, get_state_dict, exists, delete, delete_batch, keys)
}


async def client(store_name: str = DEFAULT_NAME) -> Client:
    """The functions for one store name."""
    default.default_store()
    return Client(store_name)


def reset_client(store_name: str = DEFAULT_NAME) -> None:
    """Do nothing, for programs of TorchStore: clients keep no state."""


def init_logging() -> None:
    """Configure forge's log lines, as TorchStore's function does its own; a second call changes nothing."""
    configure_logging()


async def _publish(
    key: str,
    value: Tensor | Mapping[str, Any],
    version: int | None = None,
    dtype: torch.dtype | None = None,
    timeout: float | None = None,
) -> int | None:
    store = default.default_store()
    seconds = PATIENCE if timeout is None else timeout
    await wait_for_put(key)
    if not is_sharded(value):
        return await asyncio.to_thread(store.put, key, whole(value), version, dtype=dtype, timeout=seconds)
    # Programs of TorchStore give neither; a caller that gives one wants the error that names absent ranks.
    if version is not None or timeout is not None:
        return await asyncio.to_thread(store.put, key, value, version, dtype=dtype, timeout=seconds)
    return await put_deferred(store, RankPart.of_value(key, value, dtype=dtype), seconds)


def _check_keys(call: str, keys: object) -> None:
    """Raise TypeError for a single key in place of several: each of its characters would be one."""
    if isinstance(keys, str):
        raise TypeError(f"{call} takes a list of keys, or a mapping, got the text {keys!r}")


def _check_target(key: str, target: Tensor) -> None:
    """Raise ValueError if a key's newest version cannot be read into a tensor."""
    store = default.default_store()
    part = find_part(store, key)
    with store.open(key if part is None else part.key) as snapshot:
        name = "" if part is None else part.name
        if name in snapshot.manifest.by_name:
            snapshot.check(name, target)


def _key(key: str, store_name: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a key is a text, got {key!r}")
    if SEPARATOR in key:
        raise ValueError(f"a key cannot have the character {SEPARATOR!r}, got {key!r}")
    return key if store_name == DEFAULT_NAME else f"{SEPARATOR}{store_name}{SEPARATOR}{key}"


async def _wait_for_puts(key: str) -> None:
    """Wait for this process's puts of a key, and of the state dicts that it may be a part of."""
    for owner in (key, *(part.key for part in possible_parts(key))):
        await wait_for_put(owner)


def _parts_of(owners: Iterable[str], base: str) -> list[str]:
    """The parts of state dicts, as keys, without the name of their store."""
    store = default.default_store()
    return [f"{owner}{DELIMITER}{name}" for owner in owners for name in part_names(store, base + owner)]


def _read_block(key: str, block: TensorSlice, target: Tensor | None, version: int | None) -> Tensor:
    with default.default_store().open(key, version) as snapshot:
        if snapshot.manifest.single:
            block.check(snapshot.manifest.by_name[""][0].shape)
        return snapshot.read_box(block.box, target)


def _read_state_dict(key: str, target: dict[str, Any] | None, strict: bool) -> dict[str, Any]:
    with default.default_store().open(key) as snapshot:
        if target is None:
            value: dict[str, Any] = decode(snapshot.fill())
            return value
        if snapshot.manifest.single:
            raise ValueError(f"{key} is one tensor, not a state dict: read it with get")
        names = {*snapshot.manifest.by_name} - STRUCTURES
        tensors = {name: tensor for name, tensor in encode(target).items() if name not in STRUCTURES}
        if strict and names != tensors.keys():
            differing = sorted(names ^ tensors.keys())
            raise ValueError(
                f"{key}: the tensors {differing[:3]} are in one of the state dicts alone: pass strict=False to read "
                f"the others ({len(differing)} differ)"
            )
        # In place, whatever the layouts of both are.
        common = {name: tensors[name] for name in tensors if name in names}
        if common:
            snapshot.fill(common)
        if not STRUCTURES & snapshot.manifest.by_name.keys():
            return target if strict else {**decode(snapshot.fill()), **target}
        rest = [name for name in snapshot.manifest.by_name if name not in common]
        stored: dict[str, Any] = decode(snapshot.some(rest) | common)
        # Without plain values the target has all of it.
        return target if strict and has_parts(stored) else stored
