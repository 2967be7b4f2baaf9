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

from ..system.devices import type_of
from .distributed import ALONE, RankGroup
from .flex import Runs, TreeMask, tree_attention

NAME = "forge_packed"
# A rectangle's shortest sequence is at least this share of its longest: padding costs at most a third more products,
# where one call for each length would cost more in launches.
FILL = 0.75

Collective = Callable[[Tensor, RankGroup], Tensor]


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Indices of a pack's tokens in the rectangles; on an accelerator the mask of the pack, and no rectangles.

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
    def from_lengths(
        cls, lengths: list[int], device: torch.device | str = "cpu", parents: list[int] | None = None
    ) -> PackedLayout:
        """Return the layout of runs of these lengths, back to back in this order; parents come before, -1 is none."""
        if type_of(torch.device(device)) != "cpu":
            runs = Runs.from_lengths(lengths, parents or [-1] * len(lengths))
            columns = {name: column.to(device) for name, column in runs.columns().items()}
            return cls.masked(TreeMask(runs, **columns))

        # Each run's first token in the pack, and the tokens of its context.
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        contexts = [torch.empty(0, dtype=torch.long) for _ in lengths]
        for i, parent in enumerate(parents or ()):
            if parent >= 0:
                contexts[i] = torch.cat([contexts[parent], torch.arange(starts[parent], starts[parent + 1])])
        order = sorted(range(len(lengths)), key=lambda i: (len(contexts[i]), -lengths[i]))
        queries, keys, shapes = [], [], []

        offset = 0
        scatter = torch.empty(starts[-1], dtype=torch.long)
        while order:
            # The next rectangle: the longest run that has none yet, and runs of similar length and equal context.
            width = lengths[order[0]]
            context = len(contexts[order[0]])
            rows = []
            while order and len(contexts[order[0]]) == context and lengths[order[0]] >= FILL * width:
                rows.append(order.pop(0))
            first = torch.tensor([starts[i] for i in rows])
            size = torch.tensor([lengths[i] for i in rows])
            column = torch.arange(width)
            tokens = first[:, None] + torch.minimum(column, size[:, None] - 1)
            queries.append(tokens.flatten())
            keys.append(torch.cat([torch.stack([contexts[i] for i in rows]), tokens], dim=1).flatten())

            # Where the results of real tokens are, rectangle after rectangle.
            real = column < size[:, None]
            slots = offset + torch.arange(len(rows) * width).view(len(rows), width)
            scatter[queries[-1][real.flatten()]] = slots[real]
            offset += len(rows) * width
            shapes.append((len(rows), width, context))

        return cls(torch.cat(queries).to(device), torch.cat(keys).to(device), scatter.to(device), shapes)

    @classmethod
    def masked(cls, mask: TreeMask) -> PackedLayout:
        """Return the layout of an accelerator, which has the mask only."""
        empty = torch.empty(0, dtype=torch.long, device=mask.first.device)
        return cls(empty, empty, empty, [], mask)


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

    With context parallelism the tokens are this rank's and `layout` covers all tokens: all-to-alls exchange
    tokens for heads and back (Jacobs et al. 2023, DeepSpeed Ulysses).
    With `sliding_window` a token sees itself and the `sliding_window` - 1 tokens before.
    """
    ranks = context.size
    counts = []
    if ranks > 1:
        # Key heads are repeated where there are fewer of them than ranks.
        times = count_repeats(key.shape[1], ranks)
        if times > 1:
            key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
        # [1, heads, own tokens, head_dim] to [1, own heads, tokens, head_dim], all three in one collective. Heads are
        # dealt in order, so that a rank's key heads match its query heads.
        chunks = [x[0].unflatten(0, (ranks, -1)) for x in (query, key, value)]
        counts = [x.shape[1] for x in chunks]
        heads = _exchange(torch.cat(chunks, dim=1), context, _all_to_all, _all_to_all)
        query, key, value = (x.transpose(0, 1).flatten(1, 2)[None] for x in heads.split(counts, dim=1))

    window = kwargs.get("sliding_window")
    if layout.mask is not None:
        out = tree_attention(query, key, value, layout.mask, window, scaling)
    else:
        out = _attend_rectangles(query, key, value, layout, window, scaling)

    if ranks > 1:
        tokens = _exchange(out.unflatten(0, (ranks, -1)), context, _all_to_all, _all_to_all)
        out = tokens.transpose(0, 1).flatten(1, 2)
    return out[None], None


@torch.compiler.disable
def _attend_rectangles(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, window: int | None, scale: float | None
) -> Tensor:
    """[1, heads, tokens, head_dim] -> [tokens, heads, head_dim]."""
    groups = query.shape[1] // key.shape[1]
    # Gather the tokens of all rectangles, compute one after the other, and scatter the results back.
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
            o = _attend_window(q, k, v, window, scale)
        else:
            mask = causal_mask(width, before, before + width, q.device) if before else None
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        rectangles.append(o.transpose(1, 2).flatten(0, 1))

    return torch.cat(rectangles).index_select(0, layout.scatter)


def _attend_window(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None) -> Tensor:
    """Causal attention to the last `window` tokens: q [rows, heads, width, head_dim], k and v with a prefix before.

    Linear in the width: the queries of each `window` tokens attend to those and to the `window` before.
    """
    # The first piece of queries: only it sees the prefix.
    width = q.shape[2]
    before = min(k.shape[2] - width, window)
    k, v = (x[:, :, x.shape[2] - width - before :] for x in (k, v))
    count = min(width, window)
    k0, v0 = (x[:, :, : before + count] for x in (k, v))
    mask = causal_mask(count, before, window, q.device)
    first = F.scaled_dot_product_attention(q[:, :, :count], k0, v0, attn_mask=mask, scale=scale)

    if width == count:
        return first

    # The later pieces, as rows of one call, each with its keys and the piece's before:
    # [rows, pieces, heads, window, head_dim].
    without_prefix = (q, k[:, :, before:], v[:, :, before:])
    q, k, v = (F.pad(x, (0, 0, 0, -width % window)).unflatten(2, (-1, window)).transpose(1, 2) for x in without_prefix)
    k, v = (torch.cat([x[:, :-1], x[:, 1:]], dim=3).flatten(0, 1) for x in (k, v))
    mask = causal_mask(window, window, window, q.device)
    later = F.scaled_dot_product_attention(q[:, 1:].flatten(0, 1), k, v, attn_mask=mask, scale=scale)
    later = later.unflatten(0, (q.shape[0], -1)).transpose(1, 2).flatten(2, 3)

    return torch.cat([first, later], dim=2)[:, :, :width]


def causal_mask(width: int, before: int, window: int, device: torch.device) -> Tensor:
    """[width, before + width]: whether a query sees a key, where `before` keys come before the first query.

    >>> causal_mask(2, before=0, window=2, device=torch.device("cpu")).tolist()
    [[True, False], [True, True]]
    """
    query = torch.arange(width, device=device)[:, None]
    key = torch.arange(-before, width, device=device)
    return (key <= query) & (key > query - window)


# Without a mask function of this name: transformers then makes no mask, and does not ask the device whether the pack is
# one sequence.
AttentionInterface.register(NAME, packed_attention)


def count_repeats(heads: int, ranks: int) -> int:
    """Return the number of copies of each head with which all ranks have the same number of heads.

    >>> count_repeats(2, ranks=4)
    2
    """
    return ranks // gcd(heads, ranks)


class _Exchange(torch.autograd.Function):
    """A collective whose gradient is another collective."""

    @staticmethod
    def forward(ctx, x: Tensor, group: RankGroup, collective: Collective, reverse: Collective) -> Tensor:
        ctx.group, ctx.reverse = group, reverse
        return collective(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.reverse(grad, ctx.group), None, None, None


_exchange = torch.compiler.disable(_Exchange.apply)


class _GatherUneven(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores: Tensor, counts: list[int], group: RankGroup) -> Tensor:
        ctx.counts, ctx.rank = counts, group.rank
        parts = _all_gather(F.pad(scores, (0, max(counts) - scores.shape[1]))[None], group)
        return torch.cat([part[:, :count] for part, count in zip(parts, counts, strict=True)], dim=1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # Every rank computes the same loss of all scores: it takes its own part of the gradient, without a sum.
        return grad.split(ctx.counts, dim=1)[ctx.rank], None, None


def gather_scores(
    local: tuple[Tensor, ...], counts: list[int], group: RankGroup, order: Tensor | None = None
) -> tuple[Tensor, ...]:
    """All-gather scores, [local scores] each, in the order of ranks, or by `order`, which has the index of each score
    in the order of ranks. `counts`: number of scores of each rank."""
    if group.size == 1 or not max(counts):
        scores = local  # empty scores stay in the graph, whose backward pass has collectives
    else:
        gathered = _GatherUneven.apply(torch.stack(local), counts, group)
        scores = tuple(gathered if order is None else gathered[:, order])
    # FSDP2 hooks on to what a module returns, and warns of views.
    return tuple(score.clone() if score._is_view() else score for score in scores)


# Not compiled: that would need functional collectives.
@torch.compiler.disable
def gather_tokens(tokens: Tensor, group: RankGroup) -> Tensor:
    """[1, tokens, dim] of this rank to [1, tokens * ranks, dim]; gradients are summed over ranks."""
    return _Exchange.apply(tokens[0], group, _all_gather, _reduce_scatter)[None]


@torch.compiler.disable
def scatter_tokens(partial_sums: Tensor, group: RankGroup) -> Tensor:
    """Return partial sums [1, tokens, dim] to this rank's [1, tokens / ranks, dim]."""
    return _Exchange.apply(partial_sums[0], group, _reduce_scatter, _all_gather)[None]


def _all_gather(local: Tensor, group: RankGroup) -> Tensor:
    gathered = local.new_empty(group.size * local.shape[0], *local.shape[1:])
    dist.all_gather_single(gathered, local.contiguous(), group=group.group)
    return gathered


def _reduce_scatter(addends: Tensor, group: RankGroup) -> Tensor:
    local = addends.new_empty(addends.shape[0] // group.size, *addends.shape[1:])
    dist.reduce_scatter_single(local, addends.contiguous(), group=group.group)
    return local


def _all_to_all(parts: Tensor, group: RankGroup) -> Tensor:
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=group.group)
    return received
