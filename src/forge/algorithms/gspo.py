"""GSPO: the importance ratio of a whole sequence."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import Aggregation
from .clipped import Clipped, GroupRelative
from .terms import (
    log_ratio,
    over_tokens,
    sequence_means,
    where_trained,
)


@dataclass(eq=False)
class GSPO(Clipped, GroupRelative):
    """Group sequence policy optimisation (Zheng et al. 2025, eq. 5 and 7; per token as in eq. 14).

        A_i = (r_i - mean(r)) / (std(r) + std_epsilon)  over the rewards r of a prompt's samples
        s = exp(mean over the sequence's tokens of log(pi / old))
        per token:  -min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A)

    The reward belongs to the sequence, so the clip keeps or drops a sequence as a whole. Each token's ratio has the
    value of `s` and the gradient of `s * log pi`: over a sequence they add up to the gradient of `s` if its tokens have
    one advantage and one weight. The bounds are much narrower than a token's, because a mean over tokens varies less.

    Each branch of an episode is a sequence: s is the mean over the tokens of one branch, which the clip keeps or drops
    separately, and its tokens have their share of the episode's weight. Branches of an episode may be in different
    micro-batches, and a mean over all of them would mix tokens of different contexts. If pi is the old policy,
    splitting an episode changes no gradient.

    Args:
        clip_low, clip_high, dual_clip, normalize, std, std_epsilon: as in `GRPO`.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    aggregation: ClassVar[Aggregation] = "sequence_mean"

    def ratio(self, logprobs: Tensor, old_logprobs: Tensor, weights: Tensor, sequences: Tensor | None) -> Tensor:
        """Return for each token (pi(y) / old(y))^(1 / |y|) of its whole sequence y (eq. 7), with the gradient of the
        token's log-probability (eq. 14)."""
        logs = where_trained(log_ratio(logprobs.detach(), old_logprobs), weights)
        of_sequence = over_tokens(sequence_means(logs, weights, sequences), logs, sequences)
        # The difference is 0: it only adds the gradient of the token's log-probability.
        return (of_sequence + logprobs - logprobs.detach()).exp()
