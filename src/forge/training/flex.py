"""Attention over a tree of packed runs by FlexAttention (Dong et al. 2024, arXiv:2412.05496): the path of accelerators.

One kernel computes the whole pack, without the padding and the copies of the rectangles in `attention.py`, and skips
blocks of keys that no query of a block sees. On an H100 gradients equal transformers' (`benchmarks/gpu.py`). On a CPU,
FlexAttention has no backward pass: tests compare its forward pass with the rectangles. Long sequences that share
nothing need no mask: the causal kernels of cuDNN and FlashAttention are faster there.
"""

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
    """Token runs of a pack, as arrays [runs] in the order of the pack.

    Runs are numbered in depth-first order, so that a run and all runs that continue it, directly or not, have
    consecutive numbers. Two runs of 3 and 2 tokens, and two that continue the first, of 1 and 4:

        0 --- 1        first   0  1  2  3
          `-- 2        end     3  2  3  4
        3              before  0  3  3  0

    first, end: the run's number, and the end (not included) of the numbers of those that continue it.
    lengths: tokens.
    before: tokens before the run's first one in its sequence.
    """

    first: np.ndarray
    end: np.ndarray
    lengths: np.ndarray
    before: np.ndarray

    @classmethod
    def from_lengths(cls, lengths: list[int], parents: list[int]) -> "Runs":
        """Return runs of these lengths, back to back in this order.

        Args:
            parents: the index of the run that each continues, an earlier one, or -1.

        >>> runs = Runs.from_lengths([3, 2, 2], parents=[-1, 0, 0])
        >>> runs.first.tolist(), runs.end.tolist(), runs.before.tolist()
        ([0, 1, 2], [3, 2, 3], [0, 3, 3])
        """
        # The number of runs in each subtree; parents come before, so that children are counted first.
        subtree_sizes = [1] * len(lengths)
        for run in reversed(range(len(lengths))):
            if parents[run] >= 0:
                subtree_sizes[parents[run]] += subtree_sizes[run]

        # A run's number is the first free one of its parent's interval.
        tokens_before = [0] * len(lengths)
        first_numbers = list[int]()
        free_numbers = list[int]()  # the first free number in each run's interval
        next_root = 0  # the first free number of a run without parent

        for run, parent in enumerate(parents):
            if parent < 0:
                first_numbers.append(next_root)
                next_root += subtree_sizes[run]
            else:
                first_numbers.append(free_numbers[parent])
                free_numbers[parent] += subtree_sizes[run]
                tokens_before[run] = tokens_before[parent] + lengths[parent]
            free_numbers.append(first_numbers[run] + 1)

        numbers = np.array(first_numbers)
        return cls(numbers, numbers + np.array(subtree_sizes), np.array(lengths), np.array(tokens_before))

    def columns(self) -> dict[str, Tensor]:
        """Return the attributes `first`, `end` and `position` of a `TreeMask`, by name, [tokens] each."""
        starts = self.lengths.cumsum() - self.lengths
        position = np.arange(self.lengths.sum()) + (self.before - starts).repeat(self.lengths)
        arrays = {"first": self.first.repeat(self.lengths), "end": self.end.repeat(self.lengths), "position": position}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def long_sequences(self) -> list[int]:
        """Return the lengths of the pack's sequences if all are long and share nothing, else an empty list.

        Long means at least `LONG` tokens. Sequences of one token, such as padding, may be at the end.

        >>> Runs.from_lengths([LONG, 8, 1], parents=[-1, 0, -1]).long_sequences() == [LONG + 8, 1]
        True
        >>> Runs.from_lengths([LONG, 8, 8], parents=[-1, 0, 0]).long_sequences()
        []
        """
        # A sequence is a run without tokens before it, and the runs that follow it in the pack if each continues the
        # one before: it has as many tokens before it, and its number is in that run's interval.
        starts_sequence = self.before == 0
        continues_previous = self.before[1:] == (self.before + self.lengths)[:-1]
        continues_previous &= (self.first[:-1] < self.first[1:]) & (self.first[1:] < self.end[:-1])
        if not (continues_previous | starts_sequence[1:]).all():
            return []  # a run continues an earlier one, whose tokens two sequences share

        # The first `long_count` lengths are all long only if sequences of one token are at the end.
        lengths = np.add.reduceat(self.lengths, starts_sequence.nonzero()[0])
        long_count = int((lengths > 1).sum())
        return lengths.tolist() if long_count and (lengths[:long_count] >= LONG).all() else []

    def blocks(self, window: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Return in which blocks queries see keys: bool matrices [blocks of queries, blocks of keys], the first true
        where some query sees some key, the second where all see all.

        A run is cut where a block ends. Positions of a piece are an interval, and so are the distances between those
        of two pieces: for 3 to 5 and 1 to 2 they are 1 to 4. With a window of 3 some distances are below it, not all.
        """
        ends = self.lengths.cumsum()
        tokens = int(ends[-1])

        # Pieces of runs within a block, each with its run and the interval of its positions.
        cuts = np.unique(np.concatenate([[0], ends, np.arange(BLOCK, tokens, BLOCK)]))
        starts, stops = cuts[:-1], cuts[1:]
        run_of_piece = np.searchsorted(ends, starts, side="right")
        first_position = self.before[run_of_piece] + starts - (ends - self.lengths)[run_of_piece]
        last_position = first_position + stops - starts - 1

        # The pairs of pieces of which one, `query`, continues the run of the other, `key`: in the order of their runs'
        # numbers, those that continue a run follow one another. All other pairs see nothing.
        run_number = self.first[run_of_piece]
        by_number = run_number.argsort(kind="stable")
        first_query, end_query = run_number[by_number].searchsorted([run_number, self.end[run_of_piece]])
        query_counts = end_query - first_query  # by key
        key = np.arange(len(run_of_piece)).repeat(query_counts)
        query = by_number[np.arange(len(key)) + (end_query - query_counts.cumsum()).repeat(query_counts)]

        # Whether a query sees some or all of the keys.
        sees_some, sees_every = last_position[query] >= first_position[key], first_position[query] >= last_position[key]
        if window is not None:
            sees_some &= first_position[query] - last_position[key] < window
            sees_every &= last_position[query] - first_position[key] < window

        # From pieces to blocks: all see all if as many pairs do as the blocks have.
        block_count = -(-tokens // BLOCK)
        block_of_piece = starts // BLOCK
        pieces_per_block = np.bincount(block_of_piece)
        block_pair = block_of_piece[query] * block_count + block_of_piece[key]
        pair_counts = [
            np.bincount(block_pair[is_seen], minlength=block_count**2).reshape(block_count, block_count)
            for is_seen in (sees_some, sees_every)
        ]
        sees_all = pair_counts[1] == pieces_per_block[:, None] * pieces_per_block
        if tokens % BLOCK:  # padding beyond the last token sees nothing
            sees_all[-1] = sees_all[:, -1] = False

        return pair_counts[0] > 0, sees_all


class TreeMask:
    """Attention mask of a pack: a token sees itself, earlier tokens of its run, and the runs that its run continues.

    Not a dataclass: FSDP copies those for every layer, and each copy would make its own blocks.

    runs: the pack's, in host memory.
    first, end: [tokens], these attributes of each token's run (see `Runs`).
    position: [tokens], the position of each token in its sequence.
    """

    def __init__(self, runs: Runs, first: Tensor, end: Tensor, position: Tensor) -> None:
        self.runs, self.first, self.end, self.position = runs, first, end, position
        self._blocks: dict[int | None, BlockMask] = {}

    @classmethod
    def from_lengths(cls, lengths: list[int], parents: list[int]) -> "TreeMask":
        """Return the mask of runs back to back, in host memory, with the arguments of `Runs.from_lengths`."""
        runs = Runs.from_lengths(lengths, parents)
        return cls(runs, **runs.columns())

    def sees(self, query: Tensor, key: Tensor, window: int | Tensor | None = None) -> Tensor:
        """Return whether tokens `query` see tokens `key`, indices of the pack; `window` counts the token itself."""
        first, position = self.first, self.position
        visible = (first[key] <= first[query]) & (first[query] < self.end[key]) & (position[key] <= position[query])
        return visible if window is None else visible & (position[query] - position[key] < window)

    def blocks(self, window: int | None) -> BlockMask:
        """Return the mask as FlexAttention takes it; made once for each window that a model has, None included.

        It is made from the runs in host memory. torch's `create_block_mask` computes every pair of tokens instead, by a
        function that it compiles first: on an H100 that takes .6 ms for 8,192 tokens and 64 times as long for 65,536.
        """
        if window not in self._blocks:
            block_count = len(self.first)
            device = self.first.device

            # A tensor: a number would be compiled into the kernels, or become a symbol that inductor may not know.
            window_size = None if window is None else torch.full((), window, device=device)

            # Blocks of which some pairs are visible, and full ones, by query and (for the backward pass) by key.
            some, every = self.runs.blocks(window)
            kinds = {"": some & ~every, "full_": every}
            lists = {f"{kind}kv": order_blocks(blocks) for kind, blocks in kinds.items()}
            lists |= {f"{kind}q": order_blocks(blocks.T) for kind, blocks in kinds.items()}
            columns = {f"{name}_num_blocks": counts for name, (counts, _) in lists.items()}
            columns |= {f"{name}_indices": indices for name, (_, indices) in lists.items()}
            on_device: Any = to_device(columns, device)
            self._blocks[window] = BlockMask(
                (block_count, block_count),
                **on_device,
                BLOCK_SIZE=(BLOCK, BLOCK),
                mask_mod=lambda batch, head, query, key: self.sees(query, key, window_size),
            )

        return self._blocks[window]


def order_blocks(blocks: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return, for each row of a bool matrix, the number of true columns, [1, 1, rows], and the indices of all columns,
    first those of true ones, [1, 1, rows, columns]; int32.

    >>> [part.tolist() for part in order_blocks(np.array([[False, True]]))]
    [[[[1]]], [[[[1, 0]]]]]
    """
    columns = torch.from_numpy((~blocks).argsort(axis=1, kind="stable").astype(np.int32))
    return torch.from_numpy(blocks.sum(1, dtype=np.int32))[None, None], columns[None, None]


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, window: int | None, scale: float | None
) -> Tensor:
    """Return the attention of a pack, [tokens, heads, head_dim], by the fastest kernels that the mask allows.

    Args:
        query: [1, heads, tokens, head_dim].
        key, value: [1, key heads, tokens, head_dim].
        window: how many tokens a token sees, itself included; None: all before it.
    """
    # The causal kernels compute in half precision, with heads of at most 128, and add up gradients in any order.
    is_half = query.device.type == "cuda" and query.dtype != torch.float32
    can_add = query.shape[-1] <= 128 and not torch.are_deterministic_algorithms_enabled()
    if window is None and is_half and can_add and (lengths := mask.runs.long_sequences()):
        return causal_attention(query, key, value, lengths, scale)

    # FlexAttention, which only computes the blocks of the mask that some query sees.
    attend: Any = flex_attention if query.device.type == "cpu" else _compiled_attention()
    has_groups = query.shape[1] != key.shape[1]
    attended = attend(query, key, value, block_mask=mask.blocks(window), scale=scale, enable_gqa=has_groups)
    return attended[0].transpose(0, 1)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float | None) -> Tensor:
    """Return the same as `tree_attention` for sequences that share nothing, each by a call of a causal kernel.

    Args:
        lengths: of the sequences in the order of the pack; sequences of one token come last.
    """
    group = query.shape[1] // key.shape[1]
    long_lengths = [length for length in lengths if length > 1]
    attended_sequences = []
    start = 0

    with sdpa_kernel(CAUSAL, set_priority=True) if query.device.type == "cuda" else nullcontext():
        for length in long_lengths:
            # Whole tiles: cuDNN's backward pass had NaN where the last was half empty (pytorch/pytorch#196678). Real
            # tokens do not see the zeros, which come later.
            padding = -length % BLOCK
            q, k, v = (F.pad(x[:, :, start : start + length], (0, 0, 0, padding)) for x in (query, key, value))
            result = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=group > 1)
            attended_sequences.append(result[0, :, :length].transpose(0, 1))
            start += length

    if len(long_lengths) < len(lengths):
        # A token that sees only itself gets its own value.
        attended_sequences.append(value[0, :, start:].repeat_interleave(group, 0).transpose(0, 1))
    return attended_sequences[0] if len(attended_sequences) == 1 else torch.cat(attended_sequences)


@lru_cache
def _compiled_attention() -> Callable[..., Any]:
    """Return FlexAttention, compiled for any number of tokens, as every pack has another number."""
    return torch.compile(flex_attention, dynamic=True)
