"""Shared prefixes of packed sequences: a tree of token runs, each of which a model computes once.

The samples of a prompt repeat it, and the branches of an episode repeat their common turns. A token's state depends
only on the tokens before it, so a model may compute a common prefix once, whichever sequences continue it.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..types import Batch

# Tokens that a separate run must save: below, the additional and smaller attention calls cost more than the tokens.
SAVED = 24


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The runs of a batch, every parent before its children.

    source: [computed], the index in the batch of each computed token.
    index: [tokens], the index in `source` of each token of the batch.
    positions: [computed], positions in the sequence.
    lengths, parents: [runs], of runs that lie back to back in `source`; the parent of a run without a prefix is -1.
    last: [sequences], the run that each sequence ends with; a sequence is its last run and the run's ancestors.
    saved: as in `find_prefixes`.
    """

    # Four sequences, 17 tokens, are four runs, 9 tokens:
    #
    #     sequence 0: P P P P a        run 0: P P P P    parent -1
    #     sequence 1: P P P P b c      run 1: a          parent  0
    #     sequence 2: P P P P          run 2: b c        parent  0
    #     sequence 3: Q Q              run 3: Q Q        parent -1
    #
    #     source     11 12 13 14 4 9 10 15 16    one `P P P P`, sequence 2's: 0 to 3 and 5 to 8 are not computed
    #     positions   0  1  2  3 4 4  5  0  1
    #     last        1  2  0  3                 the run that each sequence ends with

    source: np.ndarray
    index: np.ndarray
    positions: np.ndarray
    lengths: list[int]
    parents: list[int]
    last: list[int]
    saved: int

    def cost(self, sequences: Iterable[int]) -> int:
        """Return maximum tokens that a model computes for these sequences only: a run that saves too little among them
        is repeated."""
        users: dict[int, int] = {}
        for sequence in sequences:
            run = self.last[sequence]
            while run >= 0:
                users[run] = users.get(run, 0) + 1
                run = self.parents[run]
        return sum(
            self.lengths[run] * (1 if self.lengths[run] * (count - 1) >= self.saved else count)
            for run, count in users.items()
        )

    def root(self, sequence: int) -> int:
        """Return the run that a sequence starts with."""
        run = self.last[sequence]
        while self.parents[run] >= 0:
            run = self.parents[run]
        return run


def find_prefixes(tokens: np.ndarray, lengths: np.ndarray, saved: int = SAVED) -> PrefixTree:
    """Return the tree of sequences that lie back to back.

    Args:
        tokens: [tokens] ids.
        lengths: [sequences].
        saved: minimum number of tokens that each shared run must save.
    """
    ends = np.cumsum(lengths)
    starts = ends - lengths
    rows = [tokens[start:end] for start, end in zip(starts, ends, strict=True)]

    # Big-endian bytes sort as the tokens do, a prefix before what continues it.
    keys = [row.astype(">u4").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    common = np.array([_common_length(rows[a], rows[b]) for a, b in itertools.pairwise(order)], np.int64)
    runs: list[tuple[list[int], int, int, int]] = []  # its sequences, first and last position, parent

    # Intervals of `order`, with the tokens of theirs that are in a run already, and the run that ends there. Each
    # becomes a run of its common tokens, if that saves enough, and is divided where its sequences first differ.
    intervals = [(0, len(order), 0, -1)]
    while intervals:
        low, high, covered, parent = intervals.pop()
        depth = int(common[low : high - 1].min()) if high - low > 1 else int(lengths[order[low]])
        if depth > covered and (high - low == 1 or (depth - covered) * (high - low - 1) >= saved):
            runs.append((order[low:high], covered, depth, parent))
            parent = len(runs) - 1
            covered = depth
        if high - low > 1:
            cuts = [low, *(low + 1 + np.flatnonzero(common[low : high - 1] == depth)).tolist(), high]
            intervals += [(a, b, covered, parent) for a, b in itertools.pairwise(cuts)]

    # In the order of the batch: without a shared run they are its sequences as they are. Parents still come first.
    ranking = sorted(range(len(runs)), key=lambda run: (min(runs[run][0]), run))
    rank = {run: i for i, run in enumerate(ranking)}
    index = np.empty(len(tokens), np.int64)
    run_sources = []
    computed = 0

    for sequences, begin, end, _ in (runs[run] for run in ranking):
        run_sources.append(np.arange(begin, end) + starts[sequences[0]])
        for sequence in sequences:
            index[starts[sequence] + begin : starts[sequence] + end] = np.arange(computed, computed + end - begin)
        computed += end - begin

    source = np.concatenate(run_sources)
    token_runs = np.repeat(np.arange(len(ranking)), [len(sources) for sources in run_sources])
    return PrefixTree(
        source,
        index,
        positions=source - np.repeat(starts, lengths)[source],
        lengths=[runs[run][2] - runs[run][1] for run in ranking],
        parents=[-1 if runs[run][3] < 0 else rank[runs[run][3]] for run in ranking],
        last=token_runs[index[ends - 1]].tolist(),
        saved=saved,
    )


def prefix_ids(batch: Batch) -> np.ndarray:
    """Return ids [tokens] that are equal where sequences share a prefix: tokens, combined with their recorded
    experts."""
    if batch.experts is None:
        return batch.tokens
    columns = [batch.tokens.astype("<i8")[:, None].view(np.uint8), batch.experts.reshape(len(batch.tokens), -1)]
    rows = np.ascontiguousarray(np.concatenate(columns, axis=1))
    return np.unique(rows.view(f"V{rows.shape[1]}")[:, 0], return_inverse=True)[1]


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Return length of the common prefix."""
    shorter = min(len(a), len(b))
    differ = a[:shorter] != b[:shorter]
    return int(differ.argmax()) if differ.any() else shorter
