"""Causal attention over packed sequences: every sequence attends to itself only.

One call per sequence is exact but slow for hundreds of short ones, and a dense block mask wastes quadratic work. Here
sequences of similar length are gathered into rectangles, each one causal attention call. Padding sits on the right,
where causality keeps real tokens from ever seeing it, so no mask is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from .distributed import ALONE
from .layout import copies
from .sequence import to_heads, to_tokens

NAME = "forge_packed"

# A rectangle's shortest sequence is at least this share of its longest.
FILL = 0.75


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where each token of a pack sits in the rectangles.

    gather: [sum rows*width] index into the pack (padding repeats the sequence's last token).
    scatter: [tokens] index into the flattened rectangles.
    shapes: (rows, width) of each rectangle, widest first.
    """

    gather: Tensor
    scatter: Tensor
    shapes: list[tuple[int, int]]

    @classmethod
    def of(cls, lengths: list[int], device: torch.device | str = "cpu") -> PackedLayout:
        """Build the layout of sequences of these lengths, back to back in this order."""
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


# The shapes in a layout are others in every pack: a compiled layer is cut here.
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

    Under a `context` the tokens are this rank's, and `layout` is that of the tokens of all (Jacobs et al. 2023,
    Ulysses)."""
    if context.size == 1:
        return _attention(query, key, value, scaling, layout, kwargs.get("sliding_window"))[None], None
    # Heads are shared out in order, so a rank has the key heads of its query heads if both divide.
    times = copies(key.shape[1], context.size)
    if times > 1:
        key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    query, key, value = to_heads(query, key, value, context)
    out = _attention(query, key, value, scaling, layout, kwargs.get("sliding_window"))
    return to_tokens(out[None], context), None


def _attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, layout: PackedLayout, window: int | None
) -> Tensor:
    """[1, heads, tokens, head_dim] to [tokens, heads, head_dim]."""
    longest = layout.shapes[0][1]
    if window is not None and longest > window:
        raise ValueError(f"a sequence of {longest} tokens exceeds the sliding window of {window}: not supported")
    groups = query.shape[1] // key.shape[1]
    q, k, v = (x[0].transpose(0, 1).index_select(0, layout.gather) for x in (query, key, value))
    out, at = [], 0
    for rows, width in layout.shapes:
        part = slice(at, at + rows * width)
        q4, k4, v4 = (x[part].view(rows, width, x.shape[1], x.shape[2]).transpose(1, 2) for x in (q, k, v))
        if groups > 1:
            k4, v4 = (x.repeat_interleave(groups, dim=1) for x in (k4, v4))
        o = F.scaled_dot_product_attention(q4, k4, v4, is_causal=True, scale=scaling)
        out.append(o.transpose(1, 2).reshape(rows * width, query.shape[1], -1))
        at += rows * width
    return torch.cat(out).index_select(0, layout.scatter)


AttentionInterface.register(NAME, packed_attention)
# Without a mask function of this name transformers would build a dense mask for it.
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
