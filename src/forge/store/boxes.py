"""Which part of a tensor a process holds: boxes of a global shape, for plain tensors and DTensors of any layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor.placement_types import _StridedShard


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: where it starts and how far it reaches in each dimension."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.size)

    def meet(self, other: Box) -> Box | None:
        """What both have, None if that is nothing."""
        low = tuple(map(max, self.offset, other.offset))
        high = tuple(min(a + n, b + m) for a, n, b, m in self._sides(other))
        size = tuple(h - w for h, w in zip(high, low, strict=True))
        return Box(low, size) if all(n > 0 for n in size) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Indices of this block in the local tensor of `outer`."""
        starts = (a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + n) for start, n in zip(starts, self.size, strict=True))

    def _sides(self, other: Box) -> Iterator[tuple[int, int, int, int]]:
        return zip(self.offset, self.size, other.offset, other.size, strict=True)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.offset, self.size, strict=True)) + "]"


def whole(shape: Iterable[int]) -> Box:
    """The block that is everything."""
    shape = tuple(shape)
    return Box((0,) * len(shape), shape)


def local_boxes(tensor: Tensor) -> list[tuple[Box, Tensor]]:
    """What this process holds of a tensor: blocks that are not empty, each with its values (a view).

    Raises:
        ValueError: a DTensor with partial sums: there is no value yet.
    """
    if not isinstance(tensor, DTensor):
        return [(whole(tensor.shape), tensor)] if tensor.numel() else []
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    spans = [torch.arange(size) for size in tensor.shape]
    steps = list(zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True))
    # A strided shard was cut out of what mesh dimensions to its right had cut before (FSDP over tensor parallelism).
    steps = [s for s in steps if not _strided(s[0])] + [s for s in reversed(steps) if _strided(s[0])]
    for place, ranks, rank in steps:
        if isinstance(place, Partial):
            raise ValueError("a DTensor with a Partial placement holds sums that are not finished: redistribute it")
        if not isinstance(place, Replicate):
            parts = spans[place.dim].chunk(ranks)  # type: ignore[attr-defined]
            spans[place.dim] = parts[rank] if rank < len(parts) else spans[place.dim][:0]  # type: ignore[attr-defined]
    local = tensor.to_local()
    if tuple(map(len, spans)) != tuple(local.shape):
        raise ValueError(f"rank holds {tuple(local.shape)} of a tensor that is laid out as {tuple(map(len, spans))}")
    found = []
    for runs in itertools.product(*map(_runs, spans)):
        box = Box(tuple(run[0] for run in runs), tuple(run[2] for run in runs))
        if box.numel:
            found.append((box, local[tuple(slice(at, at + n) for _, at, n in runs)]))
    return found


def writes(tensor: Tensor) -> bool:
    """Whether this process is the one among its copies that writes its part."""
    if not isinstance(tensor, DTensor):
        return True
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return all(
        rank == 0 or not isinstance(place, Replicate)
        for place, rank in zip(tensor.placements, coordinate, strict=False)
    )


def missing(shape: tuple[int, ...], boxes: list[Box]) -> str | None:
    """What is wrong with blocks that should fill `shape` exactly once; None if nothing is."""
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


def _strided(place: Placement) -> bool:
    return isinstance(place, _StridedShard)


def _runs(span: Tensor) -> list[tuple[int, int, int]]:
    """Consecutive stretches of indices: (first index, place in `span`, length)."""
    if not len(span):
        return [(0, 0, 0)]
    breaks = ((span.diff() != 1).nonzero()[:, 0] + 1).tolist()
    return [(int(span[a]), a, b - a) for a, b in itertools.pairwise([0, *breaks, len(span)])]
