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

PIECE = 1 << 20  # bytes copied and hashed at a time: they stay in the CPU's cache between the two


@dataclass(frozen=True, slots=True)
class Shard:
    """A block of a tensor in a segment. `shape` is the whole tensor's, `checksum` of the block's bytes (xxh3)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    segment: str
    start: int
    checksum: str

    def view(self, segment: Tensor) -> Tensor:
        """Return the block within its segment's bytes."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        values = segment[self.start : self.start + self.box.numel * dtype.itemsize]
        return values.view(dtype).view(self.box.size)


@dataclass(frozen=True)
class Manifest:
    """A version of a key, or one rank's part of it."""

    key: str
    version: int | None  # None: the next one
    single: bool  # one tensor without a name, not a state dict
    shards: tuple[Shard, ...]

    @cached_property
    def by_name(self) -> dict[str, list[Shard]]:
        """Return the shards of each tensor."""
        shards_by_name: dict[str, list[Shard]] = {}
        for shard in self.shards:
            shards_by_name.setdefault(shard.name, []).append(shard)
        return shards_by_name

    @cached_property
    def checksums(self) -> dict[str, str]:
        """Return one checksum for each tensor, over its blocks."""
        descriptions = {
            name: json.dumps(sorted((s.dtype, s.shape, s.box.offset, s.checksum) for s in shards))
            for name, shards in sorted(self.by_name.items())
        }
        return {name: xxhash.xxh3_64_hexdigest(text.encode()) for name, text in descriptions.items()}

    @cached_property
    def digest(self) -> str:
        """Return the identity of the version: a hash of all of its bytes under their names (xxh3, 64 bits, hex)."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self.checksums).encode())

    @property
    def segments(self) -> set[str]:
        """Return names of the shared memory segments."""
        return {shard.segment for shard in self.shards if shard.segment}

    def on_host(self, host: str) -> Manifest:
        """Return a copy with the host in the names of its segments, if they have none: name@host."""
        return self.renamed({name: name if "@" in name else f"{name}@{host}" for name in self.segments})

    def renamed(self, names: Mapping[str, str]) -> Manifest:
        """Return a copy with other names of its segments."""
        shards = (replace(shard, segment=names[shard.segment]) if shard.segment else shard for shard in self.shards)
        return replace(self, shards=tuple(shards))

    def within(self, segment: str) -> Manifest:
        """Return the part that is in one segment."""
        return replace(self, shards=tuple(shard for shard in self.shards if shard.segment == segment))

    def extent(self, segment: str) -> int:
        """Return bytes of a segment, from its start to the end of its last block."""
        blocks = (shard for shard in self.shards if shard.segment == segment)
        return max(shard.start + shard.box.numel * getattr(torch, shard.dtype).itemsize for shard in blocks)

    def check(self) -> None:
        """Check that blocks fill every tensor exactly once.

        Raises:
            ValueError: names the tensor.
        """
        for name, shards in self.by_name.items():
            layouts = {(shard.dtype, shard.shape) for shard in shards}
            problem = (
                f"ranks disagree about its dtype and shape: {sorted(layouts)}"
                if len(layouts) > 1
                else overlap_or_gap(shards[0].shape, [shard.box for shard in shards if shard.box.numel])
            )
            if problem:
                raise ValueError(f"{self.key} version {self.version}: tensor {name!r} is not whole: {problem}")

    @classmethod
    def join(cls, version: int, parts: Sequence[Manifest]) -> Manifest:
        """Merge the parts of all ranks. Of equal blocks of ranks on different meshes the first is used."""
        shards: dict[tuple[str, str, Box, str], Shard] = {}
        for part in parts:
            for shard in part.shards:
                shards.setdefault((shard.name, shard.dtype, shard.box, shard.checksum), shard)
        return cls(parts[0].key, version, parts[0].single, tuple(shards.values()))

    def first_difference(self, version: Manifest) -> str | None:
        """Return the first tensor by name that differs; None if there is none, or if other blocks prevent the
        comparison."""
        for name in sorted(self.by_name.keys() | version.by_name.keys()):
            shards = self.by_name.get(name, [])
            others = version.by_name.get(name, [])
            comparable = {shard.box for shard in shards} == {shard.box for shard in others}
            if not shards or not others or (comparable and self.checksums[name] != version.checksums[name]):
                return name
        return None

    def to_json(self) -> str:
        """Return text that starts with its checksum."""
        text = json.dumps([self.key, self.version, self.single, [astuple(shard) for shard in self.shards]])
        return f"{xxhash.xxh3_64_hexdigest(text.encode())} {text}"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Invert `to_json`. CorruptWeights: the checksum differs."""
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
    """Return checksum of the bytes of a contiguous tensor on the CPU."""
    # By `update`, which leaves Python's lock to other threads.
    state = xxhash.xxh3_64()
    state.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def copy_and_hash(source: Tensor, target: Tensor, of_source: bool = False) -> str:
    """Copy and return the checksum, in one pass if the bytes are equal (same dtype, both contiguous on the CPU).

    The checksum is then the source's, so that a faulty copy is detected. Otherwise it is the target's, which must be
    contiguous on the CPU; with `of_source` always the source's, to verify what was read.
    """
    source = source.resolve_conj().resolve_neg()
    on_cpu = source.device.type == target.device.type == "cpu"
    if not (on_cpu and source.dtype == target.dtype and source.is_contiguous() and target.is_contiguous()):
        # Cast on the device: half the bytes to copy, and a CPU casts on one thread.
        target.copy_(source if source.device.type == "cpu" else source.to(target.dtype))
        return hash_tensor(source if of_source else target)
    # Piece by piece, so that the bytes to copy are still in the cache from hashing.
    read, written = (values.reshape(-1).view(torch.uint8) for values in (source, target))
    state = xxhash.xxh3_64()
    data = read.numpy()
    for start in range(0, len(read), PIECE):
        state.update(data[start : start + PIECE].data)
        written[start : start + PIECE].copy_(read[start : start + PIECE])
    return state.hexdigest()
