"""Causal attention over packed sequences, with context parallelism.

Each sequence attends to itself only. One call per sequence is slow for hundreds of short ones, and a dense block mask
wastes quadratic work. Here sequences of similar length are gathered into rectangles, one causal attention call each.
Padding is on the right, where causality hides it from real tokens: no mask is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from .distributed import ALONE, Group

NAME = "forge_packed"
FILL = 0.75  # a rectangle's shortest sequence is at least this share of its longest

Collective = Callable[[Tensor, Group], Tensor]


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The places of a pack's tokens in the rectangles.

    gather: [sum rows*width] index into the pack (padding repeats the sequence's last token).
    scatter: [tokens] index into the flattened rectangles.
    shapes: (rows, width) of each rectangle, widest first.
    """

    gather: Tensor
    scatter: Tensor
    shapes: list[tuple[int, int]]

    @classmethod
    def of(cls, lengths: list[int], device: torch.device | str = "cpu") -> PackedLayout:
        """The layout of sequences of these lengths, back to back in this order."""
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        gather, shapes, at = [], [], 0
        scatter = torch.empty(starts[-1], dtype=torch.long)
        while order:
            width = lengths[order[0]]
            rows = [i for i in order if lengths[i] >= FILL * width]
            order = order[len(rows) :]
            first = torch.tensor([starts[i] for i in rows])
            size = torch.tensor([lengths[i] for i in rows])
            column = torch.arange(width)
            gather.append((first[:, None] + torch.minimum(column, size[:, None] - 1)).flatten())
            inside = column < size[:, None]
            places = at + torch.arange(len(rows) * width).view(len(rows), width)
            scatter[gather[-1][inside.flatten()]] = places[inside]
            at += len(rows) * width
            shapes.append((len(rows), width))
        return cls(torch.cat(gather).to(device), scatter.to(device), shapes)


# Not compiled: the shapes differ in every pack.
@torch.compiler.disable
def packed_attention(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask=None,
    scaling=None,
    dropout=0.0,
    layout=None,
    context=ALONE,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, heads, tokens, head_dim] in, [1, tokens, heads, head_dim] out.

    With context parallelism the tokens are this rank's and `layout` is that of all tokens: all-to-alls exchange
    tokens for heads and back (Jacobs et al. 2023, DeepSpeed Ulysses).
    With `sliding_window` a token sees itself and the `sliding_window` - 1 tokens before.
    """
    ranks, counts = context.size, []
    if ranks > 1:
        times = repeats(key.shape[1], ranks)
        if times > 1:
            key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
        # [1, heads, own tokens, head_dim] to [1, own heads, tokens, head_dim], all three in one collective. Heads are
        # dealt in order, so that a rank's key heads are those of its query heads.
        chunks = [x[0].unflatten(0, (ranks, -1)) for x in (query, key, value)]
        counts = [x.shape[1] for x in chunks]
        mine = _Exchange.apply(torch.cat(chunks, dim=1), context, _all_to_all, _all_to_all)
        query, key, value = (x.transpose(0, 1).flatten(1, 2)[None] for x in mine.split(counts, dim=1))
    window = kwargs.get("sliding_window")
    groups = query.shape[1] // key.shape[1]
    q, k, v = (x[0].transpose(0, 1).index_select(0, layout.gather) for x in (query, key, value))
    rectangles, at = [], 0
    for rows, width in layout.shapes:
        part = slice(at, at + rows * width)
        q4, k4, v4 = (x[part].view(rows, width, x.shape[1], x.shape[2]).transpose(1, 2) for x in (q, k, v))
        if groups > 1:
            k4, v4 = (x.repeat_interleave(groups, dim=1) for x in (k4, v4))
        if window is not None and width > window:
            o = _windowed(q4, k4, v4, window, scaling)
        else:
            o = F.scaled_dot_product_attention(q4, k4, v4, is_causal=True, scale=scaling)
        rectangles.append(o.transpose(1, 2).reshape(rows * width, query.shape[1], -1))
        at += rows * width
    out = torch.cat(rectangles).index_select(0, layout.scatter)  # [tokens, heads, head_dim]
    if ranks > 1:
        mine = _Exchange.apply(out.unflatten(0, (ranks, -1)), context, _all_to_all, _all_to_all)
        out = mine.transpose(0, 1).flatten(1, 2)
    return out[None], None


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None) -> Tensor:
    """Causal attention to the last `window` tokens; all [rows, heads, width, head_dim], width > window.

    Linear in the width: the queries of each `window` tokens attend to those and to the `window` before.
    """
    width, size = q.shape[2], (-1, window)
    q0, k0, v0 = (x[:, :, :window] for x in (q, k, v))
    first = F.scaled_dot_product_attention(q0, k0, v0, is_causal=True, scale=scale)
    # [rows, pieces, heads, window, head_dim]
    q, k, v = (F.pad(x, (0, 0, 0, -width % window)).unflatten(2, size).transpose(1, 2) for x in (q, k, v))
    k, v = (torch.cat([x[:, :-1], x[:, 1:]], dim=3).flatten(0, 1) for x in (k, v))
    query, key = torch.arange(window, device=q.device)[:, None], torch.arange(-window, window, device=q.device)
    seen = (key <= query) & (key > query - window)
    rest = F.scaled_dot_product_attention(q[:, 1:].flatten(0, 1), k, v, attn_mask=seen, scale=scale)
    rest = rest.unflatten(0, (q.shape[0], -1)).transpose(1, 2).flatten(2, 3)
    return torch.cat([first, rest], dim=2)[:, :, :width]


AttentionInterface.register(NAME, packed_attention)
# Without a mask function of this name transformers would build a dense mask for it.
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


def repeats(heads: int, ranks: int) -> int:
    """How often each head is repeated so that all ranks have the same number."""
    return ranks // gcd(heads, ranks)


class _Exchange(torch.autograd.Function):
    """A collective whose gradient is another collective."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, there: Collective, back: Collective) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.back(grad, ctx.group), None, None, None


class _GatherUneven(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own: Tensor, counts: list[int], group: Group) -> Tensor:
        ctx.counts, ctx.rank = counts, group.rank
        parts = _all_gather(F.pad(own, (0, max(counts) - own.shape[1]))[None], group)
        return torch.cat([part[:, :count] for part, count in zip(parts, counts, strict=True)], dim=1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # Every rank computes the same loss of all scores: it takes its own part of the gradient, without a sum.
        return grad.split(ctx.counts, dim=1)[ctx.rank], None, None


def gather_scores(own: tuple[Tensor, ...], counts: list[int], group: Group) -> tuple[Tensor, ...]:
    """All-gather scores, each [own], in the order of ranks. `counts`: number of scores of each rank."""
    if group.size == 1 or not max(counts):
        return own  # empty scores stay in the graph, whose backward pass has collectives
    return tuple(_GatherUneven.apply(torch.stack(own), counts, group))


# Not compiled: that would need functional collectives.
@torch.compiler.disable
def gather_tokens(own: Tensor, group: Group) -> Tensor:
    """[1, tokens, dim] of this rank to [1, tokens * ranks, dim]; gradients are summed over ranks."""
    return _Exchange.apply(own[0], group, _all_gather, _reduce_scatter)[None]


@torch.compiler.disable
def scatter_tokens(part: Tensor, group: Group) -> Tensor:
    """Partial sums [1, tokens, dim] to this rank's [1, tokens / ranks, dim]."""
    return _Exchange.apply(part[0], group, _reduce_scatter, _all_gather)[None]


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
