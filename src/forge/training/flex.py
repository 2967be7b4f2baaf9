"""Attention over a tree of packed runs by FlexAttention (Dong et al. 2024, arXiv:2412.05496): the path of accelerators.

One kernel computes the whole pack, without the padding and the copies of the rectangles in `attention.py`, and skips
blocks of keys that no query of a block sees. On an H100 gradients are transformers' (`benchmarks/gpu.py`). On a CPU,
FlexAttention has no backward pass: tests compare its forward pass with the rectangles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .transfer import to_device

# Packs are padded to a multiple of BLOCK, and to at least MIN_TOKENS: for shorter ones kernels are compiled again.
BLOCK = 128
MIN_TOKENS = 256


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
    def of(cls, lengths: list[int], parents: list[int]) -> Runs:
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
        """The attributes of `TreeMask` for each token, [tokens]."""
        starts = self.lengths.cumsum() - self.lengths
        position = np.arange(self.lengths.sum()) + (self.before - starts).repeat(self.lengths)
        arrays = {"first": self.first.repeat(self.lengths), "end": self.end.repeat(self.lengths), "position": position}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def blocks(self, window: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Which blocks of keys the queries of a block see: some pairs of tokens, and all of them; bool [blocks, blocks]
        each.

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
    def of(cls, lengths: list[int], parents: list[int]) -> TreeMask:
        """The mask of runs that lie back to back, in host memory; parents come before, -1 is none."""
        runs = Runs.of(lengths, parents)
        return cls(runs, **runs.columns())

    def sees(self, query: Tensor, key: Tensor, window: int | Tensor | None = None) -> Tensor:
        """Whether tokens see others, by index in the pack; `window` counts the token itself."""
        first, position = self.first, self.position
        visible = (first[key] <= first[query]) & (first[query] < self.end[key]) & (position[key] <= position[query])
        return visible if window is None else visible & (position[query] - position[key] < window)

    def blocks(self, window: int | None) -> BlockMask:
        """The mask as FlexAttention takes it; made once for each kind of attention of a model.

        It is made from the runs, in host memory: `create_block_mask` asks for every pair of tokens, compiles that
        first, and takes an H100 .6 ms for 8,192 tokens, and 64 times that for 65,536.
        """
        if window not in self._blocks:
            count = len(self.first)
            device = self.first.device
            # A tensor: as a number it would be compiled into the kernels, or be a symbol that inductor lacks in places.
            size = None if window is None else torch.full((), window, device=device)

            def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                return self.sees(query, key, size)

            # Blocks where the mask decides, and full ones, by query and (for the backward pass) by key.
            some, every = self.runs.blocks(window)
            kinds = {"": some & ~every, "full_": every}
            lists = {f"{kind}kv": ordered(blocks) for kind, blocks in kinds.items()}
            lists |= {f"{kind}q": ordered(blocks.T) for kind, blocks in kinds.items()}
            host = {f"{name}_num_blocks": counts for name, (counts, _) in lists.items()}
            host |= {f"{name}_indices": indices for name, (_, indices) in lists.items()}
            on_device: Any = to_device(host, device)
            self._blocks[window] = BlockMask((count, count), **on_device, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=mask)
        return self._blocks[window]


def ordered(blocks: np.ndarray) -> tuple[Tensor, Tensor]:
    """The number of true columns of each row of a bool matrix, [1, 1, rows], and the columns, true ones first,
    [1, 1, rows, columns]; int32."""
    columns = torch.from_numpy((~blocks).argsort(axis=1, kind="stable").astype(np.int32))
    return torch.from_numpy(blocks.sum(1, dtype=np.int32))[None, None], columns[None, None]


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, window: int | None, scale: float | None
) -> Tensor:
    """Query [1, heads, tokens, head_dim], key and value [1, key heads, ...] -> [tokens, heads, head_dim]."""
    attend: Any = flex_attention if query.device.type == "cpu" else _compiled_attention()
    grouped = query.shape[1] != key.shape[1]
    out = attend(query, key, value, block_mask=mask.blocks(window), scale=scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)


@lru_cache
def _compiled_attention() -> Callable[..., Any]:
    """FlexAttention for any number of tokens, as every pack has another."""
    return torch.compile(flex_attention, dynamic=True)
