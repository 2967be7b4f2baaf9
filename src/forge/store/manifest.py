"""What a version consists of: where each block of each tensor lies, and its checksum."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

import torch
import xxhash
from torch import Tensor

from .boxes import Box, missing

# Copied and hashed in pieces that stay in the cache between the two.
PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Shard:
    """A block of a tensor in a segment. `shape` is that of the whole tensor, `checksum` of the block's bytes (xxh3)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    segment: str
    start: int
    checksum: str

    def view(self, segment: Tensor) -> Tensor:
        """The block within its segment's bytes."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        values = segment[self.start : self.start + self.box.numel * dtype.itemsize]
        return values.view(dtype).view(self.box.size)


@dataclass(frozen=True)
class Manifest:
    """A version of a key, or one rank's part of it. `digest` stands for all of its bytes under their names."""

    key: str
    version: int | None  # None: the next one
    single: bool  # one tensor without a name, not a state dict
    shards: tuple[Shard, ...]

    @cached_property
    def by_name(self) -> dict[str, list[Shard]]:
        found: dict[str, list[Shard]] = {}
        for shard in self.shards:
            found.setdefault(shard.name, []).append(shard)
        return found

    @cached_property
    def checksums(self) -> dict[str, str]:
        """One checksum a tensor, over its blocks."""
        return {
            name: hash_bytes(json.dumps(sorted((s.dtype, s.shape, s.box.offset, s.checksum) for s in shards)).encode())
            for name, shards in sorted(self.by_name.items())
        }

    @cached_property
    def digest(self) -> str:
        return hash_bytes(json.dumps(self.checksums).encode())

    @property
    def segments(self) -> set[str]:
        return {shard.segment for shard in self.shards if shard.segment}

    def check(self) -> None:
        """ValueError, naming the tensor, unless its blocks fill every tensor exactly once."""
        for name, shards in self.by_name.items():
            kinds = {(shard.dtype, shard.shape) for shard in shards}
            problem = (
                f"ranks disagree about its dtype and shape: {sorted(kinds)}"
                if len(kinds) > 1
                else missing(shards[0].shape, [shard.box for shard in shards if shard.box.numel])
            )
            if problem:
                raise ValueError(f"{self.key} version {self.version}: tensor {name!r} is not whole: {problem}")

    @classmethod
    def join(cls, version: int, parts: Sequence[Manifest]) -> Manifest:
        """The version that the parts of all ranks make. Of equal blocks, which ranks on different meshes have written,
        the first counts."""
        kept: dict[tuple[str, str, Box, str], Shard] = {}
        for part in parts:
            for shard in part.shards:
                kept.setdefault((shard.name, shard.dtype, shard.box, shard.checksum), shard)
        return cls(parts[0].key, version, parts[0].single, tuple(kept.values()))

    def difference(self, other: Manifest) -> str | None:
        """The first tensor by name that is not the same in both; None if there is none, or if they cannot be compared,
        their blocks being others."""
        for name in sorted(self.by_name.keys() | other.by_name.keys()):
            one, two = self.by_name.get(name, []), other.by_name.get(name, [])
            comparable = {shard.box for shard in one} == {shard.box for shard in two}
            if not one or not two or (comparable and self.checksums[name] != other.checksums[name]):
                return name
        return None

    def to_json(self) -> str:
        return json.dumps([self.key, self.version, self.single, [astuple(shard) for shard in self.shards]])

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        key, version, single, shards = json.loads(text)
        return cls(key, version, single, tuple(map(read_shard, shards)))


def read_shard(fields: list) -> Shard:
    """A shard from its fields in JSON."""
    name, dtype, shape, (offset, size), segment, start, checksum = fields
    return Shard(name, dtype, tuple(shape), Box(tuple(offset), tuple(size)), segment, start, checksum)


def hash_bytes(data: bytes) -> str:
    """xxh3, 64 bits, in hex."""
    return xxhash.xxh3_64_hexdigest(data)


def checksum(values: Tensor) -> str:
    """Of the bytes of a contiguous tensor on the CPU."""
    return xxhash.xxh3_64_hexdigest(as_bytes(values).numpy().data)


def copy_and_hash(source: Tensor, target: Tensor) -> str:
    """Fill `target`, contiguous on the CPU, and return its checksum, taken from the source where it has the same bytes:
    a copy that did not happen does not go unnoticed then."""
    source = source.resolve_conj().resolve_neg()
    if source.device.type != "cpu" or source.dtype != target.dtype or not source.is_contiguous():
        target.copy_(source)
        return checksum(target)
    return _piecewise(as_bytes(source), as_bytes(target))


def hash_and_copy(source: Tensor, target: Tensor) -> str:
    """As `copy_and_hash`, with a contiguous source on the CPU: its checksum."""
    if target.device.type != "cpu" or source.dtype != target.dtype or not target.is_contiguous():
        target.copy_(source)
        return checksum(source)
    return _piecewise(as_bytes(source), as_bytes(target))


def as_bytes(values: Tensor) -> Tensor:
    """A contiguous tensor as uint8 [bytes], without a copy."""
    return values.reshape(-1).view(torch.uint8)


def _piecewise(source: Tensor, target: Tensor) -> str:
    state = xxhash.xxh3_64()
    data = source.numpy()
    for start in range(0, len(source), PIECE):
        state.update(data[start : start + PIECE].data)
        target[start : start + PIECE].copy_(source[start : start + PIECE])
    return state.hexdigest()
