"""A pack whose tokens several ranks share: what crosses between them, in the forward pass and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .distributed import Group

Collective = Callable[[Tensor, Group], Tensor]


class _Crossing(torch.autograd.Function):
    """A collective, and the one that gradients take back."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, there: Collective, back: Collective) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.back(grad, ctx.group), None, None, None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own: Tensor, counts: list[int], group: Group) -> Tensor:
        ctx.counts, ctx.rank = counts, group.rank
        most = max(counts)
        parts = _all_gather(F.pad(own, (0, most - own.shape[1]))[None], group)
        return torch.cat([part[:, :count] for part, count in zip(parts, counts, strict=True)], dim=1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.split(ctx.counts, dim=1)[ctx.rank], None, None


# Collectives in a traced graph would have to be others; outside it they are these.
@torch.compiler.disable
def gather_tokens(own: Tensor, group: Group) -> Tensor:
    """[1, tokens, dim] of this rank to [1, tokens * ranks, dim]; gradients are summed on the way back."""
    return _Crossing.apply(own[0], group, _all_gather, _reduce_scatter)[None]


@torch.compiler.disable
def scatter_tokens(part: Tensor, group: Group) -> Tensor:
    """[1, tokens, dim] that are to be summed to this rank's [1, tokens / ranks, dim]."""
    return _Crossing.apply(part[0], group, _reduce_scatter, _all_gather)[None]


def to_heads(query: Tensor, key: Tensor, value: Tensor, group: Group) -> list[Tensor]:
    """All heads of this rank's tokens, each [1, heads, tokens, head_dim], to this rank's heads of all tokens."""
    chunks = [x[0].unflatten(0, (group.size, -1)) for x in (query, key, value)]
    mine = _Crossing.apply(torch.cat(chunks, dim=1), group, _all_to_all, _all_to_all)
    return [x.transpose(0, 1).flatten(1, 2)[None] for x in mine.split([x.shape[1] for x in chunks], dim=1)]


def to_tokens(out: Tensor, group: Group) -> Tensor:
    """This rank's heads of all tokens, [1, tokens, heads, head_dim], to all heads of this rank's tokens."""
    mine = _Crossing.apply(out[0].unflatten(0, (group.size, -1)), group, _all_to_all, _all_to_all)
    return mine.transpose(0, 1).flatten(1, 2)[None]


def whole(own: tuple[Tensor, ...], counts: list[int], group: Group) -> tuple[Tensor, ...]:
    """Numbers of some tokens, each [own], to those of all ranks in order, on all of them.

    Every rank goes on to compute the same loss of all of them, so nothing is summed on the way back: a rank's gradient
    is that of its own numbers.

    Args:
        counts: how many each rank has.
    """
    if group.size == 1:
        return own
    if not max(counts):
        return own  # still part of this rank's graph: its backward pass has collectives of its own
    return tuple(_Whole.apply(torch.stack(own), counts, group))


def _all_gather(own: Tensor, group: Group) -> Tensor:
    parts = own.new_empty(group.size * own.shape[0], *own.shape[1:])
    dist.all_gather_single(parts, own.contiguous(), group=group.group)
    return parts


def _reduce_scatter(part: Tensor, group: Group) -> Tensor:
    own = part.new_empty(part.shape[0] // group.size, *part.shape[1:])
    dist.reduce_scatter_single(own, part.contiguous(), group=group.group)
    return own


def _all_to_all(parts: Tensor, group: Group) -> Tensor:
    mine = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(mine, parts.contiguous(), group=group.group)
    return mine
