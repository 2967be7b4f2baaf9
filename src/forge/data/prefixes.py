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
    """Tree of the token runs of a batch, in which each parent is before its children.

    source: [computed], the index in the batch of each token that is computed.
    index: [tokens], for each token of the batch the index in `source` of the token that is computed for it.
    positions: [computed], the position of each computed token in its sequence.
    lengths: [runs], numbers of tokens; the runs lie back to back in `source`.
    parents: [runs], the run that precedes each in its sequences; -1 for a run that starts a sequence.
    last: [sequences], the run that each sequence ends with. A sequence consists of this run's ancestors and the run.
    saved: minimum number of tokens that sharing a run saves, as in `find_prefixes`.
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
        """Return an upper bound of the number of tokens that a model computes for a micro-batch of these sequences.

        A run that saves fewer than `saved` tokens among them is computed once for each sequence.
        """
        use_counts: dict[int, int] = {}  # number of these sequences by run
        for sequence in sequences:
            run = self.last[sequence]
            while run >= 0:
                use_counts[run] = use_counts.get(run, 0) + 1
                run = self.parents[run]

        tokens = 0
        for run, count in use_counts.items():
            is_shared = self.lengths[run] * (count - 1) >= self.saved
            tokens += self.lengths[run] * (1 if is_shared else count)
        return tokens

    def root(self, sequence: int) -> int:
        """Return the index of the run that a sequence starts with."""
        run = self.last[sequence]
        while self.parents[run] >= 0:
            run = self.parents[run]
        return run


def find_prefixes(tokens: np.ndarray, lengths: np.ndarray, saved: int = SAVED) -> PrefixTree:
    """Return the tree of the prefixes that sequences share.

    Args:
        tokens: [tokens], ids of all sequences, which lie back to back.
        lengths: [sequences], numbers of tokens.
        saved: minimum number of tokens that each shared run must save; shorter common prefixes are not shared.

    >>> tree = find_prefixes(np.array([5, 6, 7, 5, 6, 8, 9]), lengths=np.array([3, 4]), saved=1)
    >>> tree.lengths, tree.parents  # the run [5, 6], continued by [7] and by [8, 9]
    ([2, 1, 2], [-1, 0, 0])
    """
    ends = np.cumsum(lengths)
    starts = ends - lengths
    rows = [tokens[start:end] for start, end in zip(starts, ends, strict=True)]

    # Big-endian bytes sort as the tokens do, a prefix before what continues it.
    sorted_ids = sorted(range(len(rows)), key=lambda sequence: rows[sequence].astype(">u4").tobytes())

    # common_lengths[i] is the length of the prefix that sequences sorted_ids[i] and sorted_ids[i + 1] share.
    common_lengths = np.array([_common_length(rows[a], rows[b]) for a, b in itertools.pairwise(sorted_ids)], np.int64)
    runs: list[tuple[list[int], int, int, int]] = []  # (its sequences, first position, end position, parent)

    # An interval (low, high, covered, parent) is the sequences sorted_ids[low:high], the number of their first tokens
    # that are in runs already, and the last of these runs. The tokens that all its sequences share become a run, if
    # that saves enough; then it is divided where its sequences first differ.
    intervals = [(0, len(sorted_ids), 0, -1)]
    while intervals:
        low, high, covered, parent = intervals.pop()
        count = high - low
        shared_length = int(common_lengths[low : high - 1].min()) if count > 1 else int(lengths[sorted_ids[low]])
        if shared_length > covered and (count == 1 or (shared_length - covered) * (count - 1) >= saved):
            runs.append((sorted_ids[low:high], covered, shared_length, parent))
            parent = len(runs) - 1
            covered = shared_length
        if count > 1:
            differing = low + 1 + np.flatnonzero(common_lengths[low : high - 1] == shared_length)
            cuts = [low, *differing.tolist(), high]
            intervals += [(a, b, covered, parent) for a, b in itertools.pairwise(cuts)]

    # Runs in the order of their first sequence in the batch: without a shared run they are its sequences as they are.
    # Of one sequence, parents still come first.
    ranking = sorted(range(len(runs)), key=lambda run: (min(runs[run][0]), run))
    run_index = {run: position for position, run in enumerate(ranking)}
    token_index = np.empty(len(tokens), np.int64)
    run_sources = []
    next_index = 0

    for sequences, first, end, _ in (runs[run] for run in ranking):
        run_sources.append(np.arange(first, end) + starts[sequences[0]])
        run_length = end - first
        for start in starts[sequences]:
            token_index[start + first : start + end] = np.arange(next_index, next_index + run_length)
        next_index += run_length

    source = np.concatenate(run_sources)
    token_runs = np.repeat(np.arange(len(ranking)), [len(sources) for sources in run_sources])
    return PrefixTree(
        source,
        token_index,
        positions=source - np.repeat(starts, lengths)[source],
        lengths=[runs[run][2] - runs[run][1] for run in ranking],
        parents=[-1 if runs[run][3] < 0 else run_index[runs[run][3]] for run in ranking],
        last=token_runs[token_index[ends - 1]].tolist(),
        saved=saved,
    )


def prefix_ids(batch: Batch) -> np.ndarray:
    """Return [tokens], ids that are equal for equal tokens with equal recorded experts, for `find_prefixes`: the token
    ids themselves if the batch has no experts."""
    if batch.experts is None:
        return batch.tokens
    # One row of bytes for each token, numbered by its content.
    columns = [batch.tokens.astype("<i8")[:, None].view(np.uint8), batch.experts.reshape(len(batch.tokens), -1)]
    rows = np.ascontiguousarray(np.concatenate(columns, axis=1))
    return np.unique(rows.view(f"V{rows.shape[1]}")[:, 0], return_inverse=True)[1]


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of two sequences.

    >>> _common_length(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
    2
    """
    shorter = min(len(a), len(b))
    differ = a[:shorter] != b[:shorter]
    return int(differ.argmax()) if differ.any() else shorter
