"""Attention over a tree of packed runs by FlexAttention (Dong et al. 2024, arXiv:2412.05496): the path of accelerators.

One kernel computes the whole pack, without the padding and the copies of the rectangles in `attention.py`, and skips
blocks of keys that no query of a block sees. On an H100 gradients are transformers' (`benchmarks/gpu.py`). On a CPU,
FlexAttention has no backward pass: tests compare its forward pass with the rectangles. Long sequences that share
nothing need no mask: the library's causal kernels are faster there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .distributed import to_device

# Packs are padded to a multiple of BLOCK, and to at least MIN_TOKENS: for shorter ones kernels are compiled again.
BLOCK = 128
MIN_TOKENS = 256
# Sequences of at least that many tokens are computed one by one, if a pack has no others. On an H100 the causal kernels
# reach 1.9 times FlexAttention's rate at 8,192 tokens, and 1.7 at 65,536.
LONG = 4096
CAUSAL = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


class Runs(NamedTuple):
    """The runs of a pack in depth-first order, so that a run and all that continue it are an interval; arrays [runs].

    Two runs of 3 and 2 tokens, and two that continue the first, of 1 and 4:

        0 --- 1        first   0  1  2  3
          `-- 2        end     3  2  3  4
        3              before  0  3  3  0

    first, end: that interval. lengths: tokens. before: positions before its first token.
    """

    first: np.ndarray
    end: np.ndarray
    lengths: np.ndarray
    before: np.ndarray

    @classmethod
    def from_lengths(cls, lengths: list[int], parents: list[int]) -> Runs:
        """Runs that lie back to back; parents come before, -1 is none."""
        # The number of runs in each subtree; parents come before, so that children are counted first.
        size = [1] * len(lengths)
        for run in reversed(range(len(lengths))):
            if parents[run] >= 0:
                size[parents[run]] += size[run]

        # A run's number is the first free one of its parent's interval.
        before = [0] * len(lengths)
        first = list[int]()
        free = list[int]()
        roots = 0

        for run, parent in enumerate(parents):
            if parent < 0:
                first.append(roots)
                roots += size[run]
            else:
                first.append(free[parent])
                free[parent] += size[run]
                before[run] = before[parent] + lengths[parent]
            free.append(first[run] + 1)

        numbers = np.array(first)
        return cls(numbers, numbers + np.array(size), np.array(lengths), np.array(before))

    def columns(self) -> dict[str, Tensor]:
        """Return the attributes of `TreeMask` for each token, [tokens]."""
        starts = self.lengths.cumsum() - self.lengths
        position = np.arange(self.lengths.sum()) + (self.before - starts).repeat(self.lengths)
        arrays = {"first": self.first.repeat(self.lengths), "end": self.end.repeat(self.lengths), "position": position}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def long_sequences(self) -> list[int]:
        """Return lengths of the sequences that lie one after the other; empty if some continue the same run, or are
        short. Those of one token, such as padding, may be at the end."""
        begins = self.before == 0
        follows = self.before[1:] == (self.before + self.lengths)[:-1]
        # A run may have as many tokens before it without continuing its neighbour.
        follows &= (self.first[:-1] < self.first[1:]) & (self.first[1:] < self.end[:-1])
        if not (follows | begins[1:]).all():
            return []
        lengths = np.add.reduceat(self.lengths, begins.nonzero()[0])
        longer = lengths > 1
        count = int(longer.sum())
        is_long = longer[:count].all() and (lengths[:count] >= LONG).all()
        return lengths.tolist() if count and is_long else []

    def blocks(self, window: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Return which blocks of keys the queries of a block see: some pairs of tokens, and all of them; bool [blocks,
        blocks] each.

        A run is cut where a block ends. Positions of a piece are an interval, and so are the distances between those
        of two pieces: for 3 to 5 and 1 to 2 they are 1 to 4. With a window of 3 some distances are below it, not all.
        """
        ends = self.lengths.cumsum()
        tokens = int(ends[-1])

        # Pieces of runs within a block, each with its run and the interval of its positions.
        cuts = np.unique(np.concatenate([[0], ends, np.arange(BLOCK, tokens, BLOCK)]))
        starts = cuts[:-1]
        stops = cuts[1:]
        run = np.searchsorted(ends, starts, side="right")
        low = self.before[run] + starts - (ends - self.lengths)[run]
        high = low + stops - starts - 1

        # Whether one piece continues the other's run, and sees some or all of its keys.
        first = self.first[run]
        end = self.end[run]
        continues = (first <= first[:, None]) & (first[:, None] < end)
        nearest = low[:, None] - high
        furthest = high[:, None] - low
        some = continues & (furthest >= 0)
        every = continues & (nearest >= 0)

        if window is not None:
            some &= nearest < window
            every &= furthest < window

        # Pieces to blocks.
        heads = np.searchsorted(starts, np.arange(0, tokens, BLOCK))
        some = np.logical_or.reduceat(np.logical_or.reduceat(some, heads, axis=0), heads, axis=1)
        every = np.logical_and.reduceat(np.logical_and.reduceat(every, heads, axis=0), heads, axis=1)
        if tokens % BLOCK:  # padding beyond the last token sees nothing
            every[-1] = every[:, -1] = False

        return some, every


class TreeMask:
    """Attention mask of a pack: a token sees those before it in its run and in the runs that this one continues.

    Not a dataclass: FSDP copies those for every layer, and each copy would make its own blocks.

    runs: the pack's, in host memory.
    first, end: [tokens], the interval of each token's run and those that continue it.
    position: [tokens], in the sequence.
    """

    def __init__(self, runs: Runs, first: Tensor, end: Tensor, position: Tensor) -> None:
        self.runs, self.first, self.end, self.position = runs, first, end, position
        self._blocks: dict[int | None, BlockMask] = {}

    @classmethod
    def from_lengths(cls, lengths: list[int], parents: list[int]) -> TreeMask:
        """Return the mask of runs that lie back to back, in host memory; parents come before, -1 is none."""
        runs = Runs.from_lengths(lengths, parents)
        return cls(runs, **runs.columns())

    def sees(self, query: Tensor, key: Tensor, window: int | Tensor | None = None) -> Tensor:
        """Return whether tokens see others, by index in the pack; `window` counts the token itself."""
        first, position = self.first, self.position
        visible = (first[key] <= first[query]) & (first[query] < self.end[key]) & (position[key] <= position[query])
        return visible if window is None else visible & (position[query] - position[key] < window)

    def blocks(self, window: int | None) -> BlockMask:
        """Return the mask as FlexAttention takes it; made once for each kind of attention of a model.

        It is made from the runs, in host memory: `create_block_mask` asks for every pair of tokens, compiles that
        first, and takes an H100 .6 ms for 8,192 tokens, and 64 times that for 65,536.
        """
        if window not in self._blocks:
            count = len(self.first)
            device = self.first.device

            # A tensor: as a number it would be compiled into the kernels, or be a symbol that inductor lacks in places.
            size = None if window is None else torch.full((), window, device=device)

            def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                return self.sees(query, key, size)

            # Blocks where the mask decides, and full ones, by query and (for the backward pass) by key.
            some, every = self.runs.blocks(window)
            kinds = {"": some & ~every, "full_": every}
            lists = {f"{kind}kv": order_blocks(blocks) for kind, blocks in kinds.items()}
            lists |= {f"{kind}q": order_blocks(blocks.T) for kind, blocks in kinds.items()}
            host = {f"{name}_num_blocks": counts for name, (counts, _) in lists.items()}
            host |= {f"{name}_indices": indices for name, (_, indices) in lists.items()}
            on_device: Any = to_device(host, device)
            self._blocks[window] = BlockMask(
                (count, count), **on_device, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=is_visible
            )

        return self._blocks[window]


def order_blocks(blocks: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return the number of true columns of each row of a bool matrix, [1, 1, rows], and the columns, true ones first,
    [1, 1, rows, columns]; int32."""
    columns = torch.from_numpy((~blocks).argsort(axis=1, kind="stable").astype(np.int32))
    return torch.from_numpy(blocks.sum(1, dtype=np.int32))[None, None], columns[None, None]


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, window: int | None, scale: float | None
) -> Tensor:
    """Query [1, heads, tokens, head_dim], key and value [1, key heads, ...] -> [tokens, heads, head_dim]."""
    # The causal kernels compute in half precision, with heads of at most 128, and add up gradients in any order.
    is_half = query.device.type == "cuda" and query.dtype != torch.float32
    if window is None and is_half and query.shape[-1] <= 128 and not torch.are_deterministic_algorithms_enabled():
        lengths = mask.runs.long_sequences()
        if lengths:
            return causal_attention(query, key, value, lengths, scale)
    return masked_attention(query, key, value, mask.blocks(window), scale)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask, scale: float | None) -> Tensor:
    """`tree_attention` by FlexAttention."""
    attend: Any = flex_attention if query.device.type == "cpu" else _compiled_attention()
    grouped = query.shape[1] != key.shape[1]
    out = attend(query, key, value, block_mask=blocks, scale=scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float | None) -> Tensor:
    """`tree_attention` of sequences of these lengths, one after the other; single tokens come last."""
    group = query.shape[1] // key.shape[1]
    longer = [length for length in lengths if length > 1]
    parts = []
    start = 0

    with sdpa_kernel(CAUSAL, set_priority=True) if query.device.type == "cuda" else nullcontext():
        for length in longer:
            # Whole tiles: cuDNN's backward pass had NaN where the last was half empty (pytorch/pytorch#196678). Real
            # tokens do not see the zeros, which come later.
            surplus = -length % BLOCK
            q, k, v = (F.pad(x[:, :, start : start + length], (0, 0, 0, surplus)) for x in (query, key, value))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=group > 1)
            parts.append(out[0, :, :length].transpose(0, 1))
            start += length

    if len(longer) < len(lengths):
        # One key: the result is its value.
        parts.append(value[0, :, start:].repeat_interleave(group, 0).transpose(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@lru_cache
def _compiled_attention() -> Callable[..., Any]:
    """FlexAttention for any number of tokens, as every pack has another."""
    return torch.compile(flex_attention, dynamic=True)
