"""A version that is held for reading, into tensors of any layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .boxes import Box, local_boxes, whole
from .errors import CorruptWeights
from .manifest import Manifest, Shard, checksum, hash_and_copy
from .parts import flatten


class Snapshot:
    """The tensors of one version. Whatever is read has the checksum that it was put with, or is an error."""

    def __init__(self, manifest: Manifest, memory: Mapping[str, Tensor]) -> None:
        self.manifest, self.memory = manifest, memory
        self._verified: set[int] = set()

    @property
    def version(self) -> int:
        assert self.manifest.version is not None
        return self.manifest.version

    @property
    def digest(self) -> str:
        return self.manifest.digest

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, whole, under its name. Valid within the block that holds the snapshot: where a tensor lies in
        one piece it is not copied."""
        for name in self.manifest.by_name:
            yield name, self._view(name)

    def fill(self, into: Any = None) -> Any:
        """Fill a tensor, DTensor or (nested) state dict in place; new tensors if it is None. See `VersionStore.get`."""
        if into is None:
            new = {name: self._new(name) for name in self.manifest.by_name}
            return new[""] if self.manifest.single else new
        targets, single = flatten(into)
        if single != self.manifest.single:
            kinds = ("a state dict", "one tensor")
            raise ValueError(f"{self.manifest.key} is {kinds[self.manifest.single]}, not {kinds[single]}")
        for name, target in targets.items():
            self.read(name, target)
        return into

    @torch.no_grad()
    def read(self, name: str, target: Tensor) -> None:
        """Fill what this process holds of one tensor.

        Raises:
            KeyError: no such tensor.
            ValueError: its shape differs.
            CorruptWeights: its values are not those which were put.
        """
        shards = self._shards(name)
        if shards[0].shape != tuple(target.shape):
            raise ValueError(
                f"{self._where(name)} has shape {shards[0].shape}, it cannot be read into {tuple(target.shape)}"
            )
        if target.is_meta:
            raise ValueError(f"{self._where(name)} cannot be read into a tensor on the meta device: it has no memory")
        for box, values in local_boxes(target):
            for shard in shards:
                if overlap := box.meet(shard.box):
                    self._copy(shard, overlap, values.detach()[overlap.within(box)])

    def _copy(self, shard: Shard, part: Box, target: Tensor) -> None:
        source = shard.view(self.memory[shard.segment])
        if part == shard.box and id(shard) not in self._verified:
            self._confirm(shard, hash_and_copy(source, target))
        else:
            self._verify(shard, source)
            target.copy_(source[part.within(shard.box)])

    def _view(self, name: str) -> Tensor:
        shards = self._shards(name)
        if len(shards) > 1 or not shards[0].segment:
            return self._new(name)
        source = shards[0].view(self.memory[shards[0].segment])
        self._verify(shards[0], source)
        return source

    def _new(self, name: str) -> Tensor:
        shards = self._shards(name)
        made = torch.empty(shards[0].shape, dtype=getattr(torch, shards[0].dtype))
        self.read(name, made)
        return made

    def _shards(self, name: str) -> list[Shard]:
        try:
            return self.manifest.by_name[name]
        except KeyError:
            known = list(self.manifest.by_name)
            raise KeyError(f"{self._where(name)} is not there; it has {len(known)} tensors: {known[:3]} ...") from None

    def _verify(self, shard: Shard, source: Tensor) -> None:
        if id(shard) not in self._verified:
            self._confirm(shard, checksum(source))

    def _confirm(self, shard: Shard, found: str) -> None:
        if found != shard.checksum:
            part = "" if shard.box == whole(shard.shape) else f" {shard.box}"
            raise CorruptWeights(
                f"{self._where(shard.name)}{part} does not have the checksum that it was published with"
            )
        self._verified.add(id(shard))

    def _where(self, name: str) -> str:
        what = f"tensor {name!r}" if name else "the tensor"
        return f"{self.manifest.key} version {self.manifest.version}: {what}"
