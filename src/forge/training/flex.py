"""Attention over a tree of packed runs by FlexAttention (Dong et al. 2024, arXiv:2412.05496): the path of accelerators.

One kernel computes the whole pack, without the padding and the copies of the rectangles in `attention.py`, and skips
blocks of keys that no query of a block sees. The kernels were not run on a GPU yet. On a CPU, FlexAttention has no
backward pass: tests compare its forward pass with the rectangles.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

_compiled: dict[str, Any] = {}  # of this process, once an accelerator needs it


@dataclass(frozen=True, slots=True)
class TreeMask:
    """Which tokens of a pack see which: those before them in their own run and in the runs that it continues.

    Runs are numbered in depth-first order, so that a run and all that continue it are an interval.

    first, end: [tokens], that interval of each token's run.
    position: [tokens], in the sequence.
    """

    first: Tensor
    end: Tensor
    position: Tensor
    _blocks: dict[int | None, BlockMask] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, lengths: list[int], parents: list[int], device: torch.device | str = "cpu") -> TreeMask:
        """Of runs that lie back to back; parents come before, -1 is none."""
        size, before = [1] * len(lengths), [0] * len(lengths)
        for run in reversed(range(len(lengths))):
            if parents[run] >= 0:
                size[parents[run]] += size[run]
        first, free, roots = list[int](), list[int](), 0
        for run, parent in enumerate(parents):
            if parent < 0:
                first.append(roots)
                roots += size[run]
            else:
                first.append(free[parent])
                free[parent] += size[run]
                before[run] = before[parent] + lengths[parent]
            free.append(first[run] + 1)
        count = torch.tensor(lengths)
        start = count.cumsum(0) - count
        offset = torch.tensor(before) - start
        columns = (torch.tensor(first), torch.tensor(first) + torch.tensor(size), offset)
        of_token = [column.repeat_interleave(count) for column in columns]
        of_token[2] += torch.arange(int(count.sum()))
        begins, ends, position = (column.to(device) for column in of_token)
        return cls(begins, ends, position)

    def sees(self, query: Tensor, key: Tensor, window: int | None = None) -> Tensor:
        """Whether tokens see others, by index in the pack; `window` counts the token itself."""
        first, position = self.first, self.position
        seen = (first[key] <= first[query]) & (first[query] < self.end[key]) & (position[key] <= position[query])
        return seen if window is None else seen & (position[query] - position[key] < window)

    def blocks(self, window: int | None) -> BlockMask:
        """The mask as FlexAttention takes it; made once for each kind of attention of a model."""
        if window not in self._blocks:
            count, device = len(self.first), self.first.device

            def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                return self.sees(query, key, window)

            make = create_block_mask if device.type == "cpu" else _compile("mask", create_block_mask)
            self._blocks[window] = make(mask, None, None, count, count, device=device)
        return self._blocks[window]


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, window: int | None, scale: float | None
) -> Tensor:
    """Query [1, heads, tokens, head_dim], key and value [1, key heads, ...] -> [tokens, heads, head_dim]."""
    attend = flex_attention if query.device.type == "cpu" else _compile("attention", flex_attention)
    grouped = query.shape[1] != key.shape[1]
    out = attend(query, key, value, block_mask=mask.blocks(window), scale=scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)


def _compile(name: str, function: Any) -> Any:
    """Dynamic, as every pack has another number of tokens."""
    if name not in _compiled:
        _compiled[name] = torch.compile(function, dynamic=True)
    return _compiled[name]
