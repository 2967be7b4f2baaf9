"""Boxes: which blocks of a tensor one process holds, for any layout of a DTensor."""

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
    """A block of a tensor: its offset (first index) and its size in each dimension.

    >>> print(Box(offset=(2, 0), size=(1, 3)))
    [2:3, 0:3]
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.size)

    def meet(self, box: "Box") -> "Box | None":
        """Return the intersection with another block of the same tensor; None if it is empty.

        >>> print(Box((0, 0), (2, 3)).meet(Box((1, 1), (4, 4))))
        [1:2, 1:3]
        """
        start = tuple(map(max, self.offset, box.offset))
        dimensions = zip(self.offset, self.size, box.offset, box.size, start, strict=True)
        size = tuple(min(a + n, b + m) - first for a, n, b, m, first in dimensions)
        return Box(start, size) if all(n > 0 for n in size) else None

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Return the indices of this block in a tensor that holds only the block `outer`, which contains it.

        >>> Box((3, 0), (1, 2)).within(Box((2, 0), (2, 2)))
        (slice(1, 2, None), slice(0, 2, None))
        """
        starts = (a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + n) for start, n in zip(starts, self.size, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.offset, self.size, strict=True)) + "]"


def full_box(shape: Iterable[int]) -> Box:
    """Return the block that covers a whole tensor of this shape.

    >>> full_box((2, 3))
    Box(offset=(0, 0), size=(2, 3))
    """
    shape = tuple(shape)
    return Box((0,) * len(shape), shape)


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return whether a tensor is a DTensor, without importing the class, which takes 0.7 s.

    A process that has not imported the class has no DTensor.
    """
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def local_boxes(tensor: Tensor) -> list[tuple[Box, Tensor]]:
    """Return the part of a tensor that this process holds, as (block, values) pairs; values are views of the tensor.

    A plain tensor is one block. Empty blocks are left out.

    Raises:
        ValueError: a DTensor has a Partial placement.
    """
    if not is_dtensor(tensor):
        return [(full_box(tensor.shape), tensor)] if tensor.numel() else []

    from torch.distributed.tensor.placement_types import _StridedShard

    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this process is not in the tensor's mesh
        return []

    # For each dimension of the tensor the indices that this rank holds, divided by one mesh dimension after the other.
    # An example: 4 rows over a mesh of 2 (FSDP) by 2 (tensor parallel), placements [_StridedShard(0), Shard(0)], for
    # the rank at the coordinate (0, 1):
    #
    #     [0 1 2 3]     all rows
    #     [    2 3]     Shard comes first: the second of 2 tensor-parallel ranks
    #     [    2  ]     then _StridedShard: the first of 2 FSDP ranks
    #
    # It holds the box [2:3]. With Shard in both places the order would be the other way round: [0 1], then [1].
    held_indices = [torch.arange(size) for size in tensor.shape]
    divisions = list(zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True))

    # Strided shards come last, and in the reverse order: each divides what the mesh dimensions to its right have left
    # (FSDP over tensor parallelism).
    ordinary = [step for step in divisions if not isinstance(step[0], _StridedShard)]
    strided = [step for step in reversed(divisions) if isinstance(step[0], _StridedShard)]
    for placement, ranks, rank in ordinary + strided:
        if placement.is_partial():
            raise ValueError(
                "a DTensor with a Partial placement cannot be stored, because it has partial sums: redistribute it "
                "first"
            )
        if not placement.is_replicate():
            chunks = held_indices[placement.dim].chunk(ranks)  # type: ignore[attr-defined]
            empty = held_indices[placement.dim][:0]  # type: ignore[attr-defined]
            # `chunk` makes fewer parts than ranks of a short dimension: the last ranks hold nothing.
            held_indices[placement.dim] = chunks[rank] if rank < len(chunks) else empty  # type: ignore[attr-defined]

    local = tensor.to_local()
    if tuple(map(len, held_indices)) != tuple(local.shape):
        raise ValueError(
            f"the local tensor has shape {tuple(local.shape)}, but its DTensor layout needs "
            f"{tuple(map(len, held_indices))}"
        )
    if not local.numel():
        return []

    # Uneven strided shards may hold indices with gaps, such as [0 1 4 5]. In each dimension they are divided into runs
    # (first index, position in the local tensor, length), here (0, 0, 2) and (4, 2, 2). Each combination of runs is a
    # box.
    runs_by_dimension = []
    for indices in held_indices:
        breaks = ((indices.diff() != 1).nonzero()[:, 0] + 1).tolist()  # positions after a gap
        runs_by_dimension.append(
            [(int(indices[a]), a, b - a) for a, b in itertools.pairwise([0, *breaks, len(indices)])]
        )

    boxes = []
    for runs in itertools.product(*runs_by_dimension):
        box = Box(tuple(first for first, _, _ in runs), tuple(length for _, _, length in runs))
        slices = tuple(slice(position, position + length) for _, position, length in runs)
        boxes.append((box, local[slices]))
    return boxes


def overlap_or_gap(shape: tuple[int, ...], boxes: list[Box]) -> str | None:
    """Return why blocks do not fill a tensor of this shape exactly once, as the end of an error; None if they do.

    >>> overlap_or_gap((4,), [Box((0,), (3,))])
    '1 of its 4 elements were not written (there is [0:3])'
    """
    full = full_box(shape)
    boxes = sorted(boxes, key=lambda box: box.offset)
    for index, a in enumerate(boxes):
        for b in itertools.islice(boxes, index + 1, None):
            if shape and b.offset[0] >= a.offset[0] + a.size[0]:
                break  # b starts behind a, and so do all later blocks
            if not a.meet(b):
                continue
            return f"{a} was written twice, with different values" if a == b else f"{a} and {b} were both written"

    gap = full.numel - sum(box.numel for box in boxes)
    if gap == 0:
        return None
    written = ", ".join(map(str, boxes)) or "nothing"
    return f"{gap} of its {full.numel} elements were not written (there is {written})"
