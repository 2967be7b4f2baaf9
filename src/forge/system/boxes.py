"""Boxes: the blocks of a tensor that one process holds, whatever the DTensor's layout."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: offset and size in each dimension."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.size)

    def meet(self, other: Box) -> Box | None:
        """The intersection, None if it is empty."""
        low = tuple(map(max, self.offset, other.offset))
        sides = zip(self.offset, self.size, other.offset, other.size, low, strict=True)
        size = tuple(min(a + n, b + m) - start for a, n, b, m, start in sides)
        return Box(low, size) if all(n > 0 for n in size) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Indices of this block in the local tensor of `outer`."""
        starts = (a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + n) for start, n in zip(starts, self.size, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.offset, self.size, strict=True)) + "]"


def whole(shape: Iterable[int]) -> Box:
    """The block that is the whole tensor."""
    shape = tuple(shape)
    return Box((0,) * len(shape), shape)


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor. There are none where nothing has imported them, which takes .7 s."""
    module = sys.modules.get("torch.distributed.tensor")
    return isinstance(tensor, getattr(module, "DTensor", ()))


def local_boxes(tensor: Tensor) -> list[tuple[Box, Tensor]]:
    """This process's part of a tensor: its non-empty blocks, each with its values (a view).

    Raises:
        ValueError: a DTensor with Partial placements.
    """
    if not is_dtensor(tensor):
        return [(whole(tensor.shape), tensor)] if tensor.numel() else []
    from torch.distributed.tensor.placement_types import _StridedShard

    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    spans = [torch.arange(size) for size in tensor.shape]
    steps = list(zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True))
    # A strided shard divides after the mesh dimensions to its right (FSDP over tensor parallelism).
    ordinary = [step for step in steps if not isinstance(step[0], _StridedShard)]
    strided = [step for step in reversed(steps) if isinstance(step[0], _StridedShard)]
    for place, ranks, rank in ordinary + strided:
        if place.is_partial():
            raise ValueError("a DTensor with a Partial placement holds partial sums: redistribute it")
        if not place.is_replicate():
            parts = spans[place.dim].chunk(ranks)  # type: ignore[attr-defined]
            spans[place.dim] = parts[rank] if rank < len(parts) else spans[place.dim][:0]  # type: ignore[attr-defined]
    local = tensor.to_local()
    if tuple(map(len, spans)) != tuple(local.shape):
        raise ValueError(f"rank holds {tuple(local.shape)} of a tensor that is laid out as {tuple(map(len, spans))}")
    if not local.numel():
        return []
    runs = []  # of each dimension, stretches of consecutive indices: (first index, place in the span, length)
    for span in spans:
        breaks = ((span.diff() != 1).nonzero()[:, 0] + 1).tolist()
        runs.append([(int(span[a]), a, b - a) for a, b in itertools.pairwise([0, *breaks, len(span)])])
    found = []
    for block in itertools.product(*runs):
        box = Box(tuple(first for first, _, _ in block), tuple(n for _, _, n in block))
        found.append((box, local[tuple(slice(at, at + n) for _, at, n in block)]))
    return found


def overlap_or_gap(shape: tuple[int, ...], boxes: list[Box]) -> str | None:
    """Why the blocks do not fill `shape` exactly once; None if they do."""
    everything = whole(shape)
    boxes = sorted(boxes, key=lambda box: box.offset)
    for number, a in enumerate(boxes):
        for b in itertools.islice(boxes, number + 1, None):
            if shape and b.offset[0] >= a.offset[0] + a.size[0]:
                break  # so do all that follow
            if not a.meet(b):
                continue
            return f"{a} was written twice, with different values" if a == b else f"{a} and {b} were both written"
    gap = everything.numel - sum(box.numel for box in boxes)
    if gap == 0:
        return None
    there = ", ".join(map(str, boxes)) or "nothing"
    return f"{gap} of its {everything.numel} elements were not written (there is {there})"
