"""Muon's direction of an update: matrices with equal singular values, their computation divided over ranks.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement, _StridedShard

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5

Slices = tuple[slice, ...]
Placements = tuple[Placement, ...]


class Update(NamedTuple):
    """An update of a matrix, or of a stack of them.

    parameter: whose layout it has. part: makes this rank's part of the update, in any dtype. apply: takes the part of
    its direction, in bfloat16.
    """

    parameter: Tensor
    part: Callable[[], Tensor]
    apply: Callable[[Tensor], None]


class Part(NamedTuple):
    """A rank's part of a matrix; ranks with the same `copy` have parts of one copy of it."""

    slices: Slices
    copy: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its rows and columns."""
        return tuple(part.stop - part.start for part in self.slices)

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


def rounds(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """The matrices in groups that are orthogonalised together: one for each rank, of about the same cost.

    All ranks get the same order, as it depends on shapes alone.
    """
    alone = [[parameter] for parameter in parameters if not _is_divided(parameter)]
    # A round takes as long as its most costly matrix: neighbours in this order are nearly alike.
    divided = sorted(filter(_is_divided, parameters), key=_cost, reverse=True)
    size = dist.get_world_size() if divided else 1
    return alone + [divided[first : first + size] for first in range(0, len(divided), size)]


def orthogonalise(updates: Sequence[Update]) -> None:
    """Give each update of one of the `rounds` the direction of its matrix. All ranks must call this.

    Each rank gets one whole matrix from the others, in bfloat16, iterates, and returns the parts of the result. A rank
    sends and receives about twice the bytes of a matrix, however many ranks there are.
    """
    first = updates[0].parameter
    if not _is_divided(first):
        for update in updates:
            update.apply(_alone(update.part().bfloat16(), update.parameter))
        return
    assert isinstance(first, DTensor)
    rank = dist.get_rank()
    device = torch.device(first.device_mesh.device_type)
    layouts = [_layout(update.parameter) for update in updates]
    own = layouts[rank] if rank < len(updates) else []
    # Where there are copies of the shards, each matrix is gathered from one of them.
    senders = [owner for owner, layout in enumerate(layouts) if layout[owner].copy == layout[rank].copy]
    gathered = _exchange(
        device,
        [layout[rank].size if owner in senders else 0 for owner, layout in enumerate(layouts)],
        lambda owner: updates[owner].part(),
        [part.size if part.copy == own[rank].copy else 0 for part in own],
    )
    direction = torch.empty(0)
    if own:
        direction = torch.empty(updates[rank].parameter.shape, dtype=torch.bfloat16, device=device)
        for part, piece in zip(own, gathered, strict=True):
            if piece.numel():
                direction[part.slices] = piece.view(part.shape)
    # The iteration needs the most memory: nothing else is kept meanwhile.
    gathered.clear()
    if own:
        direction = newton_schulz(direction)
    returned = _exchange(
        device,
        [part.size for part in own],
        lambda other: direction[own[other].slices],
        [layout[rank].size for layout in layouts],
    )
    for update, layout, piece in zip(updates, layouts, returned, strict=True):
        update.apply(piece.view(layout[rank].shape))


def newton_schulz(update: Tensor) -> Tensor:
    """A matrix, or each of a stack of experts, with all singular values near 1; in its dtype."""
    stack = update[None] if update.dim() == 2 else update
    x = stack.mT if stack.shape[-2] > stack.shape[-1] else stack
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if stack.shape[-2] > stack.shape[-1] else x).view(update.shape)


def _alone(half: Tensor, parameter: Tensor) -> Tensor:
    """The direction of an update whose matrices are whole on this rank, or are gathered on every rank."""
    if not isinstance(parameter, DTensor) or _has_whole_matrices(parameter):
        return newton_schulz(half) if half.numel() else half
    mesh = parameter.device_mesh
    parts = DTensor.from_local(
        half, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    copies = DTensor.from_local(newton_schulz(parts.full_tensor()), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return copies.redistribute(placements=parameter.placements).to_local().to(half.device)


def _is_divided(parameter: Tensor) -> bool:
    """Whether the ranks have parts of each matrix, on a mesh of all of them: they share the work."""
    if not isinstance(parameter, DTensor) or _has_whole_matrices(parameter):
        return False
    mesh = parameter.device_mesh
    # A mesh of some ranks, such as that of TorchTitan's experts, would need another process group.
    return mesh.size() > 1 and mesh.mesh.flatten().tolist() == list(range(dist.get_world_size()))


def _has_whole_matrices(parameter: DTensor) -> bool:
    """Whether only a stack is divided: each of its matrices, an expert, is whole on its rank."""
    return all(
        placement.is_replicate() or _dimension(placement) < parameter.dim() - 2 for placement in parameter.placements
    )


def _cost(parameter: Tensor) -> int:
    """Proportional to the operations of an iteration."""
    return parameter.numel() * min(parameter.shape[-2:])


def _layout(parameter: Tensor) -> list[Part]:
    """The part of each rank."""
    assert isinstance(parameter, DTensor)
    return _parts(parameter.device_mesh, tuple(parameter.shape), parameter.placements)


# Layers repeat a few shapes, and the ranks may be hundreds.
@lru_cache
def _parts(mesh: DeviceMesh, shape: tuple[int, ...], placements: Placements) -> list[Part]:
    # Strided shards are parts of what later dimensions of the mesh have divided: FSDP shards what TP has sharded.
    order = sorted(range(mesh.ndim), key=lambda number: isinstance(placements[number], _StridedShard))
    parts = []
    for position in torch.cartesian_prod(*[torch.arange(size) for size in mesh.mesh.shape]).view(-1, mesh.ndim):
        starts = [0] * len(shape)
        sizes = list(shape)
        # As torch divides: parts of equal size, of which the last ones may be short or empty.
        for number in order:
            if placements[number].is_replicate():
                continue
            dimension = _dimension(placements[number])
            step = -(-sizes[dimension] // mesh.size(number))
            begin = min(sizes[dimension], step * int(position[number]))
            starts[dimension] += begin
            sizes[dimension] = min(step, sizes[dimension] - begin)
        slices = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        copy = tuple(int(position[number]) for number in order if placements[number].is_replicate())
        parts.append(Part(slices, copy))
    return parts


def _dimension(placement: Placement) -> int:
    """That a placement shards."""
    dimension: int = placement.dim  # type: ignore[attr-defined]
    return dimension


def _exchange(
    device: torch.device, sizes_sent: Sequence[int], piece: Callable[[int], Tensor], sizes: Sequence[int]
) -> list[Tensor]:
    """Send each of the first ranks its piece of so many elements, and receive so many from each of the first ranks."""
    world = dist.get_world_size()
    sent = torch.empty(sum(sizes_sent), dtype=torch.bfloat16, device=device)
    for rank, part in enumerate(sent.split(list(sizes_sent)) if sizes_sent else ()):
        if part.numel():
            part.copy_(piece(rank).flatten())
    received = torch.empty(sum(sizes), dtype=torch.bfloat16, device=device)
    # As bytes, which all backends take.
    lengths, lengths_sent = (
        [size * received.element_size() for size in numbers] + [0] * (world - len(numbers))
        for numbers in (sizes, sizes_sent)
    )
    dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), lengths, lengths_sent)
    return list(received.split(list(sizes))) if sizes else []
