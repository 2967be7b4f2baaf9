"""Parts of state dicts as keys, as TorchStore has them: `v0/layers.0.weight` of the state dict `v0`.

TorchStore puts each tensor of a state dict under a separate key, and the nesting last, under `v0/MAPPING`. Here a state
dict is one version of one key; these functions find and read what such a name stands for.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...system.boxes import Box
from .errors import MissingVersion
from .manifest import Manifest
from .protocol import Store
from .transfer import OpenVersion
from .values import STATE_DICT, STRUCTURE, Leaf, filled

DELIMITER = "/"  # between the key of a state dict and the name of a part
MAPPING = "MAPPING"  # the part that has the place of each other one

Place = tuple[object, ...]  # keys of mappings and indices of lists


class Part(NamedTuple):
    """A part of a state dict: the key of the latter, and the name of the part in it."""

    key: str
    name: str


def possible_parts(key: str) -> Iterator[Part]:
    """Everything that a key may be a part of, the longest key first: a state dict's may have slashes."""
    pieces = key.split(DELIMITER)
    for count in range(len(pieces) - 1, 0, -1):
        yield Part(DELIMITER.join(pieces[:count]), DELIMITER.join(pieces[count:]))


def find_part(store: Store, key: str, version: int | None = None) -> Part | None:
    """The part that a key is; None if it is a key itself, or nothing."""
    if store.exists(key, version):
        return None
    for part in possible_parts(key):
        manifest = _manifest(store, part.key, version)
        if manifest is None:
            continue
        # Tensors are known without the version, which may be on another host.
        is_tensor = part.name in manifest.by_name and part.name != STATE_DICT
        if is_tensor or part.name in part_names(store, part.key, version):
            return part
    return None


def part_names(store: Store, key: str, version: int | None = None) -> list[str]:
    """The names of a state dict's parts; none of a key that has another value, or does not exist."""
    manifest = _manifest(store, key, version)
    if manifest is None:
        return []
    if STATE_DICT not in manifest.by_name:
        return [*manifest.by_name, MAPPING]
    try:
        with store.open(key, manifest.version) as snapshot:
            return [*_leaves(snapshot), MAPPING]
    except MissingVersion:  # dropped meanwhile
        return []


def read_part(
    store: Store, part: Part, into: Tensor | None = None, block: Box | None = None, version: int | None = None
) -> Any:
    """Read a part: a tensor, whole or a block of it, into a tensor of any layout or a new one; or another value.

    Raises:
        MissingVersion: the state dict does not have it any more.
        ValueError: shapes differ, or a block or a target is given for another value than a tensor.
    """
    with store.open(part.key, version) as snapshot:
        leaves = _leaves(snapshot)
        if part.name == MAPPING:
            return {name: place for name, (place, _) in leaves.items()}
        # A tensor in a tuple has a name, too, though the tuple is one leaf.
        if part.name not in leaves and part.name not in snapshot.manifest.by_name:
            raise MissingVersion(f"{part.key} version {snapshot.version} has no {part.name!r}")
        value = leaves[part.name][1] if part.name in leaves else Leaf(part.name)
        if into is None and block is None:
            return filled(value, _Tensors(snapshot))
        if not isinstance(value, Leaf):
            raise ValueError(f"{part.key}{DELIMITER}{part.name} is not a tensor, but {value!r:.80}")
        if block is not None:
            return snapshot.read_box(block, into, value.name)
        assert into is not None
        snapshot.read(value.name, into)
        return into


def _manifest(store: Store, key: str, version: int | None) -> Manifest | None:
    """The manifest of a state dict; None of another value, or if there is none."""
    versions = store.versions(key) if version is None else [version] if store.exists(key, version) else []
    if not versions:
        return None
    manifest = store.manifest(key, versions[-1])
    return None if manifest.single or STRUCTURE in manifest.by_name else manifest


def _leaves(snapshot: OpenVersion) -> dict[str, tuple[Place, Any]]:
    """The place and the value of each part of a state dict, a `Leaf` for a tensor."""
    shards = snapshot.manifest.by_name
    if STATE_DICT not in shards:  # a mapping of tensors alone
        return {name: ((name,), Leaf(name)) for name in shards}
    from torch.distributed.checkpoint._traverse import traverse_state_dict  # takes half a second to import

    # Of a process of this run, as `decode` reads it.
    structure = pickle.loads(_Tensors(snapshot)[STATE_DICT].numpy().tobytes())
    leaves: dict[str, tuple[Place, Any]] = {}

    def add(place: Place, value: Any) -> None:
        leaves[".".join(map(str, place))] = place, value

    traverse_state_dict(structure, add, lambda value: isinstance(value, Leaf))
    return leaves


class _Tensors(dict[str, Tensor]):
    """The tensors of a version, each read when it is asked for."""

    def __init__(self, snapshot: OpenVersion) -> None:
        super().__init__()
        self.snapshot = snapshot

    def __missing__(self, name: str) -> Tensor:
        shard = self.snapshot.manifest.by_name[name][0]
        tensor = torch.empty(shard.shape, dtype=getattr(torch, shard.dtype))
        self.snapshot.read(name, tensor)
        return tensor
