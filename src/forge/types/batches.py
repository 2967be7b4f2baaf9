"""Input of a trainer: batches of token arrays, pairs, and how far a data set was read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from . import Episode, Origin


@dataclass(slots=True)
class Batch:
    """Sequences back to back, with what a loss needs to know about every token. All arrays are numpy.

    `tokens`, `mask`, `logprobs`, `versions`, `advantages` and `weights` are [tokens]; `lengths` is [sequences] and
    sums to the number of tokens. Only tokens with mask True are trained on. `logprobs` is NaN where the behaviour
    policy is unknown. `origins` says what the versions among the trained tokens stand for. `weights` holds each
    token's share of the loss: a batch's loss is the weighted sum of its tokens' losses, so any split of a batch
    gives the same loss and gradient. `rewards`, where all sequences are scored, has what each trained token earned:
    a step's or a turn's at its last one, an episode's at its end. `ref_logprobs` is filled in by a reference model,
    `proximal_logprobs` by the trainer where a step makes several updates: of the policy that it starts from;
    `values` by a critic, `returns` is what that critic should have said. `experts`, [tokens, layers, k], are those of
    the engine, `UNKNOWN_EXPERT` where they are not known; a policy in training takes them instead of its routers' own.
    `recorded` numbers the tokens of which a trainer records what it computes, from 0; -1 for the others. `groups` is
    [sequences]: those of one prompt have the same number. So is `episodes`, where some have branches, which are
    neighbours: those of one episode have the same number; `branch_shares` then says how much of its episode's trained
    tokens each sequence has.

    `unit` neighbouring sequences belong together (2: the pairs of preference data) and are never separated.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    ref_logprobs: np.ndarray | None = None
    proximal_logprobs: np.ndarray | None = None
    rewards: np.ndarray | None = None
    values: np.ndarray | None = None
    returns: np.ndarray | None = None
    experts: np.ndarray | None = None
    recorded: np.ndarray | None = None
    groups: np.ndarray | None = None
    episodes: np.ndarray | None = None
    branch_shares: np.ndarray | None = None
    origins: frozenset[Origin] = frozenset()
    unit: int = 1

    PER_SEQUENCE: ClassVar[tuple[str, ...]] = ("groups", "episodes", "branch_shares")
    PER_TOKEN: ClassVar[tuple[str, ...]] = (
        *("tokens", "mask", "logprobs", "versions", "advantages", "weights"),
        *("ref_logprobs", "proximal_logprobs", "rewards", "values", "returns", "experts", "recorded"),
    )

    def __len__(self) -> int:
        """Return number of sequences."""
        return len(self.lengths)

    def select(self, sequences: np.ndarray) -> Batch:
        """Return the batch of these sequences only (indices into `lengths`), in this order."""
        # Columns of tokens by the positions of the sequences, columns of sequences by their number.
        starts = np.concatenate([[0], np.cumsum(self.lengths)])
        index = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in sequences])
        per_token = {name: values[index] for name in self.PER_TOKEN if (values := getattr(self, name)) is not None}
        per_sequence = {
            name: values[sequences] for name in self.PER_SEQUENCE if (values := getattr(self, name)) is not None
        }
        lengths = self.lengths[sequences]
        return Batch(lengths=lengths, origins=self.origins, unit=self.unit, **per_token, **per_sequence)

    def trained_counts(self) -> np.ndarray:
        """Return [episodes], the trained tokens of each episode, over all of its branches in the batch."""
        # Branches of an episode are neighbours: their counts add up.
        counts = np.add.reduceat(self.mask, np.cumsum(self.lengths) - self.lengths, dtype=np.int64)
        if self.episodes is None:
            return counts
        first = np.flatnonzero(np.diff(self.episodes, prepend=self.episodes[0] - 1))
        return np.add.reduceat(counts, first)


class Pair(NamedTuple):
    """Two episodes that answer the same context."""

    chosen: Episode
    rejected: Episode


@dataclass
class Seen:
    """A set of stream indices that has nearly all of them from 0 on: all below `low`, and those `above`."""

    low: int = 0
    above: set[int] = field(default_factory=set)

    def __contains__(self, index: int) -> bool:
        return index < self.low or index in self.above

    def add(self, index: int) -> None:
        """Record an index."""
        if index not in self:
            self.above.add(index)
        while self.low in self.above:
            self.above.remove(self.low)
            self.low += 1
