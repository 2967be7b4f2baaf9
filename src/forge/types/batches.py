"""Input of a trainer: batches of token arrays, preference pairs, and how far a data set was read."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from . import Episode, Origin


@dataclass(slots=True)
class Batch:
    """Packed sequences, back to back, with the values of every token that a loss needs; all arrays are numpy.

    `tokens`, `mask`, `logprobs`, `versions`, `advantages` and `weights` are [tokens]; `lengths` is [sequences] and
    sums to the number of tokens. Only tokens with mask True are trained on. `logprobs` is NaN where the behaviour
    policy is unknown. `origins` has the origin of each version among the trained tokens. `weights` holds each token's
    share of the loss: a batch's loss is the weighted sum of its tokens' losses, so any split of a batch gives the same
    loss and gradient.

    Others are [tokens] or None. `rewards`, if all sequences are scored, has what each trained token earned: the reward
    of a step or a turn at its last token, an episode's at its end. `ref_logprobs` are a reference model's.
    `proximal_logprobs` are of the policy that a step of several updates starts from; the trainer adds them.
    `targets` are the tokens that a policy scores instead of `tokens`, which it reads.
    `values` are a critic's, `returns` their targets. `experts`, [tokens, layers, k], are those that the engine took,
    `UNKNOWN_EXPERT` if that is not known; a policy in training takes them instead of its routers' own. `recorded`
    numbers from 0 the tokens for which a trainer records what it computes; it is -1 for other tokens.

    Others are [sequences] or None. `images` are of each prompt, as in an episode. `groups` has the same number for the
    sequences of one prompt. `episodes`, if some
    have branches, has the same number for the sequences of one episode, which are neighbours; `branch_shares` is then
    each sequence's share of the trained tokens of its episode.

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
    targets: np.ndarray | None = None
    values: np.ndarray | None = None
    returns: np.ndarray | None = None
    experts: np.ndarray | None = None
    recorded: np.ndarray | None = None
    images: np.ndarray | None = None
    groups: np.ndarray | None = None
    episodes: np.ndarray | None = None
    branch_shares: np.ndarray | None = None
    origins: "frozenset[Origin]" = frozenset()
    unit: int = 1

    PER_SEQUENCE: ClassVar[tuple[str, ...]] = ("images", "groups", "episodes", "branch_shares")
    PER_TOKEN: ClassVar[tuple[str, ...]] = (
        *("tokens", "mask", "logprobs", "versions", "advantages", "weights"),
        *("ref_logprobs", "proximal_logprobs", "rewards", "targets", "values", "returns", "experts", "recorded"),
    )

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.lengths)

    def select(self, sequences: np.ndarray) -> "Batch":
        """Return a batch of only the sequences at the indices `sequences`, in that order."""
        starts = np.concatenate([[0], np.cumsum(self.lengths)])
        tokens = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in sequences])
        per_token = {name: values[tokens] for name in self.PER_TOKEN if (values := getattr(self, name)) is not None}
        per_sequence = {
            name: values[sequences] for name in self.PER_SEQUENCE if (values := getattr(self, name)) is not None
        }
        lengths = self.lengths[sequences]
        return Batch(lengths=lengths, origins=self.origins, unit=self.unit, **per_token, **per_sequence)

    def trained_counts(self) -> np.ndarray:
        """Return the number of trained tokens of each episode, [episodes], over all of its branches in the batch."""
        counts = np.add.reduceat(self.mask, np.cumsum(self.lengths) - self.lengths, dtype=np.int64)
        if self.episodes is None:
            return counts
        # Branches of an episode are neighbours: add the counts from each first branch to the next one.
        return np.add.reduceat(counts, np.flatnonzero(np.diff(self.episodes, prepend=self.episodes[0] - 1)))


class Pair(NamedTuple):
    """Two episodes that answer the same context, of which `chosen` is preferred."""

    chosen: "Episode"
    rejected: "Episode"


@dataclass
class Seen:
    """Compact set of the seen indices of a data stream: all below `low`, and those in `above`.

    >>> seen = Seen(low=3)
    >>> seen.add(4)
    >>> 2 in seen, 3 in seen, 4 in seen
    (True, False, True)
    """

    low: int = 0
    above: set[int] = field(default_factory=set)

    def __contains__(self, index: int) -> bool:
        return index < self.low or index in self.above

    def add(self, index: int) -> None:
        """Add an index, and raise `low` to the first index that was not seen."""
        if index not in self:
            self.above.add(index)
        while self.low in self.above:
            self.above.remove(self.low)
            self.low += 1
