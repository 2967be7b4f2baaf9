"""Causal attention over packed sequences and trees of them, with context parallelism.

Each sequence attends to itself only. One call per sequence is slow for hundreds of short ones, and a dense block mask
wastes quadratic work. Here sequences of similar length are gathered into rectangles, one causal attention call each.
Padding is on the right, where causality hides it from real tokens: no mask is needed.

A run of tokens may continue others, its context, which it shares with other runs (`forge.data.prefixes`). Runs whose
contexts have the same length share a rectangle, and its mask: their keys are the context's and their own.

On an accelerator FlexAttention computes the whole pack instead (`forge.training.flex`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from .distributed import ALONE, Group
from .flex import Runs, TreeMask, tree_attention

NAME = "forge_packed"
FILL = 0.75  # a rectangle's shortest sequence is at least this share of its longest

Collective = Callable[[Tensor, Group], Tensor]


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The places of a pack's tokens in the rectangles; on an accelerator the mask of the pack, and no rectangles.

    queries: [sum rows*width] index into the pack (padding repeats the run's last token).
    keys: [sum rows*(context + width)] likewise, of the context's tokens and the run's own.
    scatter: [tokens] index into the flattened rectangles of queries.
    shapes: (rows, width, context) of each rectangle.
    """

    queries: Tensor
    keys: Tensor
    scatter: Tensor
    shapes: list[tuple[int, int, int]]
    mask: TreeMask | None = None

    @classmethod
    def of(
        cls, lengths: list[int], device: torch.device | str = "cpu", parents: list[int] | None = None
    ) -> PackedLayout:
        """The layout of runs of these lengths, back to back in this order; parents come before, -1 is none."""
        if torch.device(device).type != "cpu":
            runs = Runs.of(lengths, parents or [-1] * len(lengths))
            columns = {name: column.to(device) for name, column in runs.columns().items()}
            return cls.masked(TreeMask(runs, **columns))
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        before = [torch.empty(0, dtype=torch.long) for _ in lengths]
        for i, parent in enumerate(parents or ()):
            if parent >= 0:
                before[i] = torch.cat([before[parent], torch.arange(starts[parent], starts[parent + 1])])
        order = sorted(range(len(lengths)), key=lambda i: (len(before[i]), -lengths[i]))
        queries, keys, shapes, at = [], [], [], 0
        scatter = torch.empty(starts[-1], dtype=torch.long)
        while order:
            width, context = lengths[order[0]], len(before[order[0]])
            rows = []
            while order and len(before[order[0]]) == context and lengths[order[0]] >= FILL * width:
                rows.append(order.pop(0))
            first = torch.tensor([starts[i] for i in rows])
            size = torch.tensor([lengths[i] for i in rows])
            column = torch.arange(width)
            own = first[:, None] + torch.minimum(column, size[:, None] - 1)
            queries.append(own.flatten())
            keys.append(torch.cat([torch.stack([before[i] for i in rows]), own], dim=1).flatten())
            inside = column < size[:, None]
            places = at + torch.arange(len(rows) * width).view(len(rows), width)
            scatter[queries[-1][inside.flatten()]] = places[inside]
            at += len(rows) * width
            shapes.append((len(rows), width, context))
        return cls(torch.cat(queries).to(device), torch.cat(keys).to(device), scatter.to(device), shapes)

    @classmethod
    def masked(cls, mask: TreeMask) -> PackedLayout:
        """The layout of an accelerator: nothing but the mask."""
        nothing = torch.empty(0, dtype=torch.long, device=mask.first.device)
        return cls(nothing, nothing, nothing, [], mask)


# Not compiled, as the shapes differ in every pack; what it calls is not either, but for FlexAttention.
@torch.compiler.disable(recursive=False)
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
        mine = _exchange(torch.cat(chunks, dim=1), context, _all_to_all, _all_to_all)
        query, key, value = (x.transpose(0, 1).flatten(1, 2)[None] for x in mine.split(counts, dim=1))
    window = kwargs.get("sliding_window")
    if layout.mask is not None:
        out = tree_attention(query, key, value, layout.mask, window, scaling)
    else:
        out = _rectangles(query, key, value, layout, window, scaling)
    if ranks > 1:
        mine = _exchange(out.unflatten(0, (ranks, -1)), context, _all_to_all, _all_to_all)
        out = mine.transpose(0, 1).flatten(1, 2)
    return out[None], None


@torch.compiler.disable
def _rectangles(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, window: int | None, scale: float | None
) -> Tensor:
    """[1, heads, tokens, head_dim] -> [tokens, heads, head_dim]."""
    groups = query.shape[1] // key.shape[1]
    query = query[0].transpose(0, 1).index_select(0, layout.queries)
    key, value = (x[0].transpose(0, 1).index_select(0, layout.keys) for x in (key, value))
    queries = query.split([rows * width for rows, width, _ in layout.shapes])
    sizes = [rows * (before + width) for rows, width, before in layout.shapes]
    rectangles = []
    for (rows, width, before), *parts in zip(layout.shapes, queries, key.split(sizes), value.split(sizes), strict=True):
        q, k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in parts)
        if groups > 1:
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        if window is not None and before + width > window:
            o = _windowed(q, k, v, window, scale)
        else:
            seen = _seen(width, before, before + width, q.device) if before else None
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, scale=scale)
        rectangles.append(o.transpose(1, 2).flatten(0, 1))
    return torch.cat(rectangles).index_select(0, layout.scatter)


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None) -> Tensor:
    """Causal attention to the last `window` tokens: q [rows, heads, width, head_dim], k and v with a prefix before.

    Linear in the width: the queries of each `window` tokens attend to those and to the `window` before.
    """
    width, before = q.shape[2], min(k.shape[2] - q.shape[2], window)
    k, v = (x[:, :, x.shape[2] - width - before :] for x in (k, v))
    count = min(width, window)
    k0, v0 = (x[:, :, : before + count] for x in (k, v))
    seen = _seen(count, before, window, q.device)
    first = F.scaled_dot_product_attention(q[:, :, :count], k0, v0, attn_mask=seen, scale=scale)
    if width == count:
        return first
    # [rows, pieces, heads, window, head_dim]
    own = (q, k[:, :, before:], v[:, :, before:])
    q, k, v = (F.pad(x, (0, 0, 0, -width % window)).unflatten(2, (-1, window)).transpose(1, 2) for x in own)
    k, v = (torch.cat([x[:, :-1], x[:, 1:]], dim=3).flatten(0, 1) for x in (k, v))
    seen = _seen(window, window, window, q.device)
    rest = F.scaled_dot_product_attention(q[:, 1:].flatten(0, 1), k, v, attn_mask=seen, scale=scale)
    rest = rest.unflatten(0, (q.shape[0], -1)).transpose(1, 2).flatten(2, 3)
    return torch.cat([first, rest], dim=2)[:, :, :width]


def _seen(width: int, before: int, window: int, device: torch.device) -> Tensor:
    """[width, before + width]: whether a query sees a key, where `before` keys come before the first query."""
    query, key = torch.arange(width, device=device)[:, None], torch.arange(-before, width, device=device)
    return (key <= query) & (key > query - window)


# Without a mask function of this name: transformers then makes no mask, and does not ask the device whether the pack is
# one sequence.
AttentionInterface.register(NAME, packed_attention)


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


_exchange = torch.compiler.disable(_Exchange.apply)


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


def gather_scores(
    own: tuple[Tensor, ...], counts: list[int], group: Group, order: Tensor | None = None
) -> tuple[Tensor, ...]:
    """All-gather scores, each [own], in the order of ranks, or of `order`: of each score, the index in that order.
    `counts`: number of scores of each rank."""
    if group.size == 1 or not max(counts):
        scores = own  # empty scores stay in the graph, whose backward pass has collectives
    else:
        gathered = _GatherUneven.apply(torch.stack(own), counts, group)
        scores = tuple(gathered if order is None else gathered[:, order])
    # FSDP2 hooks on to what a module returns, and warns of views.
    return tuple(score.clone() if score._is_view() else score for score in scores)


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
