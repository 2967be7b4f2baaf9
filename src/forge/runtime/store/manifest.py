"""The manifest of a version: the blocks of each tensor, their location and checksums.

Blocks are boxes of a tensor's global shape, so that plain tensors and DTensors of any layout can be put and read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property

import torch
import xxhash
from torch import Tensor

from ...system.boxes import Box, overlap_or_gap
from .errors import CorruptWeights

PIECE = 1 << 20  # bytes that are hashed, then copied at a time: the CPU's cache still has them for the copy


@dataclass(frozen=True, slots=True)
class Shard:
    """A block of a tensor, and where it is stored.

    Attributes:
        name: the tensor's name.
        dtype: its dtype, e.g. "float32".
        shape: the shape of the whole tensor.
        box: the part of the tensor that the block is.
        segment: name of the segment of shared memory that has the block's values; empty for a tensor without elements.
        start: offset of the values in the segment, in bytes.
        checksum: xxh3 of these bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    segment: str
    start: int
    checksum: str

    def view(self, segment: Tensor) -> Tensor:
        """Return the block's values, [*box.size], as a view of its segment's bytes, uint8."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return segment[self.start : self.start + self.box.numel * dtype.itemsize].view(dtype).view(self.box.size)


@dataclass(frozen=True)
class Manifest:
    """List of the blocks of a version of a key, or of the blocks that one rank writes.

    Attributes:
        version: its number; None, before it is published, is the next one.
        single: the value is one tensor, with an empty name, and not a state dict.
    """

    key: str
    version: int | None
    single: bool
    shards: tuple[Shard, ...]

    @cached_property
    def by_name(self) -> dict[str, list[Shard]]:
        """Return the blocks of each tensor, by the tensor's name."""
        shards_by_name: dict[str, list[Shard]] = {}
        for shard in self.shards:
            shards_by_name.setdefault(shard.name, []).append(shard)
        return shards_by_name

    @cached_property
    def checksums(self) -> dict[str, str]:
        """Return a checksum for each tensor, by its name: a hash of the dtype, shape and checksum of its blocks."""
        descriptions = {
            name: json.dumps(sorted((shard.dtype, shard.shape, shard.box.offset, shard.checksum) for shard in shards))
            for name, shards in sorted(self.by_name.items())
        }
        return {name: xxhash.xxh3_64_hexdigest(text.encode()) for name, text in descriptions.items()}

    @cached_property
    def digest(self) -> str:
        """Return the identity of the version: a hash of all of its bytes under their names (xxh3, 64 bits, hex)."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self.checksums).encode())

    @property
    def segments(self) -> set[str]:
        """Return the names of the segments that hold its blocks."""
        return {shard.segment for shard in self.shards if shard.segment}

    def on_host(self, host: str) -> Manifest:
        """Return a copy whose segments are named "<name>@<host>"; names that have a host already stay."""
        return self.renamed({name: name if "@" in name else f"{name}@{host}" for name in self.segments})

    def renamed(self, names: Mapping[str, str]) -> Manifest:
        """Return a copy with renamed segments: `names` has the new name of each segment."""
        shards = (replace(shard, segment=names[shard.segment]) if shard.segment else shard for shard in self.shards)
        return replace(self, shards=tuple(shards))

    def within(self, segment: str) -> Manifest:
        """Return a copy with only the blocks that are in one segment."""
        return replace(self, shards=tuple(shard for shard in self.shards if shard.segment == segment))

    def extent(self, segment: str) -> int:
        """Return the bytes that the blocks take in a segment, from its start to the end of the last block."""
        blocks = (shard for shard in self.shards if shard.segment == segment)
        return max(shard.start + shard.box.numel * getattr(torch, shard.dtype).itemsize for shard in blocks)

    def check(self) -> None:
        """Check that the blocks fill every tensor exactly once.

        Raises:
            ValueError: they do not, or ranks disagree about a tensor's dtype or shape; names the tensor.
        """
        for name, shards in self.by_name.items():
            layouts = {(shard.dtype, shard.shape) for shard in shards}
            if len(layouts) > 1:
                problem: str | None = f"ranks disagree about its dtype and shape: {sorted(layouts)}"
            else:
                problem = overlap_or_gap(shards[0].shape, [shard.box for shard in shards if shard.box.numel])
            if problem:
                raise ValueError(f"{self.key} version {self.version}: tensor {name!r} is incomplete: {problem}")

    @classmethod
    def join(cls, version: int, parts: Sequence[Manifest]) -> Manifest:
        """Return the manifest of a version from the parts of all ranks.

        Ranks on different device meshes may write the same block: the first one is used, if all are equal.
        """
        shards: dict[tuple[str, str, Box, str], Shard] = {}
        for part in parts:
            for shard in part.shards:
                shards.setdefault((shard.name, shard.dtype, shard.box, shard.checksum), shard)
        return cls(parts[0].key, version, parts[0].single, tuple(shards.values()))

    def first_difference(self, version: Manifest) -> str | None:
        """Return the name of the first tensor, by name, that differs from another manifest's; None if none differs.

        Tensors that are divided into other blocks there are not compared.
        """
        for name in sorted(self.by_name.keys() | version.by_name.keys()):
            shards = self.by_name.get(name, [])
            other_shards = version.by_name.get(name, [])
            is_comparable = {shard.box for shard in shards} == {shard.box for shard in other_shards}
            if not shards or not other_shards or (is_comparable and self.checksums[name] != version.checksums[name]):
                return name
        return None

    def to_json(self) -> str:
        """Return the manifest as JSON, after a checksum of that text and a space."""
        text = json.dumps([self.key, self.version, self.single, [astuple(shard) for shard in self.shards]])
        return f"{xxhash.xxh3_64_hexdigest(text.encode())} {text}"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse a manifest from the text of `to_json`.

        Raises:
            CorruptWeights: the text's checksum differs.
        """
        digest, _, text = text.partition(" ")
        if digest != xxhash.xxh3_64_hexdigest(text.encode()):
            raise CorruptWeights("a manifest of the weight store is damaged: its checksum differs")

        key, version, single, fields = json.loads(text)
        shards = tuple(
            Shard(name, dtype, tuple(shape), Box(tuple(offset), tuple(size)), segment, start, checksum)
            for name, dtype, shape, (offset, size), segment, start, checksum in fields
        )
        return cls(key, version, single, shards)


def hash_tensor(values: Tensor) -> str:
    """Return the xxh3 of the bytes of a contiguous tensor on the CPU, as 16 hexadecimal digits."""
    # Only `update` releases the GIL, so that other threads can run.
    state = xxhash.xxh3_64()
    state.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def copy_and_hash(source: Tensor, target: Tensor, of_source: bool = False) -> str:
    """Copy `source` to `target` and return a checksum of the bytes.

    If both have the same dtype and are contiguous on the CPU, the bytes are copied and hashed in one pass. The checksum
    is then the source's, so that a faulty copy is detected. Otherwise it is the target's, which must be contiguous on
    the CPU.

    Args:
        of_source: always return the source's checksum, to verify a source that was read.
    """
    source = source.resolve_conj().resolve_neg()
    is_on_cpu = source.device.type == target.device.type == "cpu"
    if not (is_on_cpu and source.dtype == target.dtype and source.is_contiguous() and target.is_contiguous()):
        # A device casts before the copy: half the bytes are copied for bfloat16, and a CPU would cast on one thread.
        target.copy_(source if source.device.type == "cpu" else source.to(target.dtype))
        return hash_tensor(source if of_source else target)

    # Piece by piece, so that the bytes to copy are still in the cache from hashing.
    source_bytes, target_bytes = (values.reshape(-1).view(torch.uint8) for values in (source, target))
    state = xxhash.xxh3_64()
    buffer = source_bytes.numpy()
    for start in range(0, len(source_bytes), PIECE):
        state.update(buffer[start : start + PIECE].data)
        target_bytes[start : start + PIECE].copy_(source_bytes[start : start + PIECE])

    return state.hexdigest()
