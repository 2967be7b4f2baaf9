"""Causal attention over packed sequences and trees of them, with context parallelism.

Each sequence attends to itself only. One call per sequence is slow for hundreds of short ones, and a dense block mask
wastes quadratic work. Here sequences of similar length are gathered into rectangles, one causal attention call each.
Padding is on the right, where causality hides it from real tokens: no mask is needed.

A run of tokens may continue other runs, its context, which it shares with other runs (`forge.data.prefixes`). Runs with
contexts of the same length share a rectangle, and its mask: their keys are the context's and their own.

On an accelerator FlexAttention computes the whole pack instead (`forge.training.flex`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import gcd

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from ..config.plugin import resolve
from ..system.devices import type_of
from .distributed import ALONE, RankGroup
from .flex import Runs, TreeMask, tree_attention

NAME = "forge_packed"
EXACT = "forge_exact"
# A rectangle's shortest sequence is at least this share of its longest: padding costs at most a third more products,
# where one call for each length would cost more in launches.
FILL = 0.75

Collective = Callable[[Tensor, RankGroup], Tensor]


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Attention layout of a pack: rectangles of token indices on a CPU, the mask of the pack on an accelerator.

    Each row of a rectangle is a run of up to `width` tokens, which continues a context of `context` tokens.

    queries: [sum of rows * width], indices of tokens in the pack (padding repeats the run's last token).
    keys: [sum of rows * (context + width)], likewise, of the context's tokens, then the run's own.
    scatter: [tokens], the index of each token of the pack in `queries`.
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
    ) -> "PackedLayout":
        """Return the layout of runs of these lengths, back to back in this order.

        Args:
            parents: the number of the run that each continues, an earlier one, or -1; None: no run continues another.

        >>> layout = PackedLayout.from_lengths([4, 2, 2], parents=[-1, 0, 0])
        >>> layout.shapes  # (rows, width, tokens of context): the first run, then both that continue it
        [(1, 4, 0), (2, 2, 4)]
        """
        if type_of(torch.device(device)) != "cpu":
            runs = Runs.from_lengths(lengths, parents or [-1] * len(lengths))
            return cls.masked(TreeMask(runs, **{name: columns.to(device) for name, columns in runs.columns().items()}))

        # Each run's first token in the pack, and the tokens of its context.
        starts = [0, *accumulate(lengths)]
        contexts = [torch.empty(0, dtype=torch.long) for _ in lengths]
        for i, parent in enumerate(parents or ()):
            if parent >= 0:
                contexts[i] = torch.cat([contexts[parent], torch.arange(starts[parent], starts[parent + 1])])

        # Runs are taken from the end: by growing context, then the longest first.
        remaining = sorted(range(len(lengths)), key=lambda i: (len(contexts[i]), -lengths[i]))[::-1]
        queries, keys, shapes = [], [], []
        offset = 0
        scatter = torch.empty(starts[-1], dtype=torch.long)
        while remaining:
            # The next rectangle: the longest run that has none yet, and runs of similar length and equal context.
            width = lengths[remaining[-1]]
            context = len(contexts[remaining[-1]])
            row_runs = []
            while remaining and len(contexts[remaining[-1]]) == context and lengths[remaining[-1]] >= FILL * width:
                row_runs.append(remaining.pop())

            # Each run is a row of `width` tokens; shorter ones repeat their last token.
            first_tokens = torch.tensor([starts[i] for i in row_runs])[:, None]
            row_lengths = torch.tensor([lengths[i] for i in row_runs])[:, None]
            columns = torch.arange(width)
            tokens = first_tokens + torch.minimum(columns, row_lengths - 1)
            queries.append(tokens.flatten())
            keys.append(torch.cat([torch.stack([contexts[i] for i in row_runs]), tokens], dim=1).flatten())

            # Where the results of real tokens are, rectangle after rectangle.
            is_real = columns < row_lengths
            slots = offset + torch.arange(len(row_runs) * width).view(len(row_runs), width)
            scatter[tokens[is_real]] = slots[is_real]
            offset += len(row_runs) * width
            shapes.append((len(row_runs), width, context))

        return cls(torch.cat(queries).to(device), torch.cat(keys).to(device), scatter.to(device), shapes)

    @classmethod
    def masked(cls, mask: TreeMask) -> "PackedLayout":
        """Return the layout of an accelerator, which has the mask only."""
        empty = torch.empty(0, dtype=torch.long, device=mask.first.device)
        return cls(empty, empty, empty, [], mask)


# Not compiled, as shapes differ in every pack; of the functions that it calls only FlexAttention is.
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
    exact=False,
    **kwargs,
) -> tuple[Tensor, None]:
    """Return the attention of a pack's tokens, [1, tokens, heads, head_dim], and None, as transformers' interface
    requires.

    With context parallelism the tokens are this rank's and `layout` covers all ranks' tokens: all-to-alls exchange
    tokens for heads and back (Jacobs et al. 2023, DeepSpeed Ulysses).

    Args:
        query, key, value: [1, heads, tokens, head_dim]; key and value may have fewer heads.
        layout: the `PackedLayout` of the pack.
        context: the `RankGroup` of the context-parallel ranks.
        exact: compute with the engine's bits, on a CPU.
        kwargs: with `sliding_window` a token sees itself and the `sliding_window` - 1 tokens before.
    """
    ranks = context.size
    if ranks > 1:
        # Key heads are repeated where there are fewer of them than ranks.
        repeats = ranks // gcd(key.shape[1], ranks)  # of 2 heads on 4 ranks, each is repeated twice
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))

        # [1, heads, own tokens, head_dim] to [1, own heads, tokens, head_dim], all three in one collective. Each rank
        # gets consecutive heads, so that its key heads match its query heads. Narrower values are padded.
        width = value.shape[-1]
        padded_value = F.pad(value, (0, key.shape[-1] - width))
        chunks = [x[0].unflatten(0, (ranks, -1)) for x in (query, key, padded_value)]
        head_counts = [x.shape[1] for x in chunks]
        own_heads = _exchange(torch.cat(chunks, dim=1), context, _all_to_all, _all_to_all)
        query, key, value = (x.transpose(0, 1).flatten(1, 2)[None] for x in own_heads.split(head_counts, dim=1))
        value = value[..., :width]

    window = kwargs.get("sliding_window")
    if layout.mask is not None:
        attended = tree_attention(query, key, value, layout.mask, window, scaling)
    else:
        attended = _attend_rectangles(query, key, value, layout, window, scaling, exact)

    if ranks > 1:
        own_tokens = _exchange(attended.unflatten(0, (ranks, -1)), context, _all_to_all, _all_to_all)
        attended = own_tokens.transpose(0, 1).flatten(1, 2)
    return attended[None], None


@torch.compiler.disable
def _attend_rectangles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    window: int | None,
    scale: float | None,
    exact: bool = False,
) -> Tensor:
    """Return the attention of query, key and value [1, heads, tokens, head_dim] as [tokens, heads, head_dim]."""
    # Gather the tokens of all rectangles, compute one after the other, and put the results into the pack's order.
    query = query[0].transpose(0, 1).index_select(0, layout.queries)
    key, value = (x[0].transpose(0, 1).index_select(0, layout.keys) for x in (key, value))
    query_sizes = [rows * width for rows, width, _ in layout.shapes]
    key_sizes = [rows * (context + width) for rows, width, context in layout.shapes]
    rectangles = zip(layout.shapes, query.split(query_sizes), key.split(key_sizes), value.split(key_sizes), strict=True)

    results = []
    for (rows, width, context), *tensors in rectangles:
        q, k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in tensors)
        length = context + width
        if exact:
            window_mask = causal_mask(width, context, window or length, q.device)
            attend_exactly = resolve("forge_families.exact:attend_exactly", "training.exact")
            attended = attend_exactly(q, k, v, window_mask, scale or q.shape[-1] ** -0.5)
        elif window is not None and length > window:
            attended = _attend_window(q, k, v, window, scale)
        else:
            mask = causal_mask(width, context, length, q.device) if context else None
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )
        results.append(attended.transpose(1, 2).flatten(0, 1))

    return torch.cat(results).index_select(0, layout.scatter)


def _attend_window(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None) -> Tensor:
    """Return causal attention of q [rows, heads, width, head_dim] to itself and the `window` - 1 tokens before.

    k and v have a prefix before the tokens of q. The work is linear in the width: queries are cut into pieces
    of `window` tokens, and each piece attends to its own keys and the keys of the piece before.
    """
    # The first piece of queries: only it sees the prefix.
    width = q.shape[2]
    prefix_length = min(k.shape[2] - width, window)  # tokens of the prefix that it may see
    k, v = (x[:, :, x.shape[2] - width - prefix_length :] for x in (k, v))
    first_length = min(width, window)
    first_k, first_v = (x[:, :, : prefix_length + first_length] for x in (k, v))
    mask = causal_mask(first_length, prefix_length, window, q.device)
    first = F.scaled_dot_product_attention(
        q[:, :, :first_length], first_k, first_v, attn_mask=mask, scale=scale, enable_gqa=True
    )

    if width == first_length:
        return first

    # The later pieces are rows of one call, [rows, pieces, heads, window, head_dim], each with its own keys and those
    # of the piece before.
    without_prefix = (q, k[:, :, prefix_length:], v[:, :, prefix_length:])
    q, k, v = (F.pad(x, (0, 0, 0, -width % window)).unflatten(2, (-1, window)).transpose(1, 2) for x in without_prefix)
    k, v = (torch.cat([x[:, :-1], x[:, 1:]], dim=3).flatten(0, 1) for x in (k, v))
    mask = causal_mask(window, window, window, q.device)
    later = F.scaled_dot_product_attention(q[:, 1:].flatten(0, 1), k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    later = later.unflatten(0, (q.shape[0], -1)).transpose(1, 2).flatten(2, 3)

    return torch.cat([first, later], dim=2)[:, :, :width]


def causal_mask(width: int, before: int, window: int, device: torch.device) -> Tensor:
    """Return whether each query sees each key, [width, before + width]: itself and the `window` - 1 keys before it.

    The first `before` keys come before the first query.

    >>> causal_mask(2, before=0, window=2, device=torch.device("cpu")).tolist()
    [[True, False], [True, True]]
    """
    query = torch.arange(width, device=device)[:, None]
    key = torch.arange(-before, width, device=device)
    return (key <= query) & (key > query - window)


# No mask function is registered by this name: transformers then makes no mask, and does not ask the device whether the
# pack is one sequence.
AttentionInterface.register(NAME, packed_attention)
AttentionInterface.register(EXACT, partial(packed_attention, exact=True))


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
    """Differentiable gather of scores [kinds, local], of different length on each rank, to [kinds, all]."""

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
    """Return the scores of all ranks, [all scores] for each kind of score.

    Args:
        local: this rank's scores, [local scores] for each kind.
        counts: the number of scores of each rank.
        order: [all scores], the index of each score of the result among those of all ranks, rank after rank; None: in
            that order.
    """
    if group.size == 1 or not max(counts):
        scores = local  # empty scores stay in the graph, whose backward pass has collectives
    else:
        gathered = _GatherUneven.apply(torch.stack(local), counts, group)
        scores = tuple(gathered if order is None else gathered[:, order])

    # FSDP2 registers hooks on the tensors that a module returns, and warns of views.
    return tuple(score.clone() if score._is_view() else score for score in scores)


# Not compiled, as only functional collectives can be.
@torch.compiler.disable
def gather_tokens(tokens: Tensor, group: RankGroup) -> Tensor:
    """Return the tokens of all ranks, [1, tokens * ranks, dim], from this rank's [1, tokens, dim]. The backward pass
    sums gradients over ranks."""
    return _Exchange.apply(tokens[0], group, _all_gather, _reduce_scatter)[None]


@torch.compiler.disable
def scatter_tokens(partial_sums: Tensor, group: RankGroup) -> Tensor:
    """Return this rank's tokens, [1, tokens / ranks, dim], of the sum over ranks of their [1, tokens, dim]."""
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
