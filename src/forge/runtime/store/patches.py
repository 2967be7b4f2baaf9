"""Patches: a segment of a version, as the differences of its blocks to a version that the receiver has.

A patch is the length of its header, the header, and one code for each block. It names the checksum of each base block:
with another base it is not applied. What it makes is compared with the checksums that were published.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from .delta import Bytes, decode, encode
from .errors import CorruptWeights
from .manifest import Manifest, Shard, checksum
from .parallel import in_threads

_LENGTH = struct.Struct("<Q")


def make_patch(shards: Sequence[Shard], memory: Tensor, base: Manifest, base_memory: Mapping[str, Tensor]) -> Tensor:
    """The patch of a segment, uint8 [size].

    A block that the base does not have in this shape and dtype is in it as it is; an equal one takes no bytes.

    Args:
        shards: the blocks of the segment, whose bytes are `memory`.
        base: what this host has of the earlier version, in `base_memory` by segment.
    """
    earlier = {_layout(shard): shard for shard in base.shards}

    def coded(shard: Shard) -> tuple[str, Bytes]:
        values = shard.view(memory)
        match = earlier.get(_layout(shard))
        if match is None:
            return "", values.reshape(-1).view(torch.uint8).numpy()
        if match.checksum == shard.checksum:
            return match.checksum, np.zeros(0, np.uint8)
        return match.checksum, encode(values, match.view(base_memory[match.segment]))

    codes = list(in_threads(coded, shards, len(memory)))
    header = json.dumps([(base_checksum, len(code)) for base_checksum, code in codes]).encode()
    parts = [np.frombuffer(_LENGTH.pack(len(header)) + header, np.uint8), *(code for _, code in codes)]
    return torch.from_numpy(np.concatenate(parts))


def apply_patch(
    patch: Tensor, shards: Sequence[Shard], memory: Tensor, base: Manifest, base_memory: Mapping[str, Tensor]
) -> None:
    """Write the blocks of a segment into its bytes, `memory`; the arguments are those of `make_patch`.

    Raises:
        CorruptWeights: the patch is damaged or of another base, or a block does not have its checksum.
    """
    data = patch.numpy()
    start = _LENGTH.size + _LENGTH.unpack_from(data.data)[0]
    earlier = {_layout(shard): shard for shard in base.shards}
    codes: list[tuple[Shard, str, Bytes]] = []
    for shard, (base_checksum, length) in zip(shards, json.loads(data[_LENGTH.size : start].tobytes()), strict=True):
        codes.append((shard, base_checksum, data[start : start + length]))
        start += length

    def applied(block: tuple[Shard, str, Bytes]) -> None:
        shard, base_checksum, code = block
        values = shard.view(memory)
        match = earlier.get(_layout(shard))
        if base_checksum and (match is None or match.checksum != base_checksum):
            raise CorruptWeights(f"the patch of tensor {shard.name!r} is to other values than this host has")
        try:
            if not base_checksum:
                values.reshape(-1).view(torch.uint8).numpy()[:] = code
            elif match is not None and base_checksum == shard.checksum:
                values.copy_(match.view(base_memory[match.segment]))
            elif match is not None:
                decode(code, match.view(base_memory[match.segment]), values)
        except ValueError as error:
            raise CorruptWeights(f"the patch of tensor {shard.name!r} is damaged: {error}") from None
        if checksum(values) != shard.checksum:
            raise CorruptWeights(f"tensor {shard.name!r} does not have its checksum after its patch")

    for _ in in_threads(applied, codes, len(memory)):
        pass


def _layout(shard: Shard) -> tuple[object, ...]:
    """What two blocks must share for a difference."""
    return shard.name, shard.dtype, shard.shape, shard.box
