"""RLOO: REINFORCE on whole sequences, each sample against the mean of the others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .advantages import leave_one_out
from .base import Aggregation
from .clipped import Clipped
from .terms import (
    BOUND,
    log_ratio,
    over_tokens,
    sequence_sums,
    where_trained,
)


@dataclass(eq=False)
class RLOO(Clipped):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, "Back to basics", eq. 7), clipped for samples that are not fresh.

        A_i = r_i - mean of the prompt's other rewards
        R = product over the sequence's tokens of pi / old
        per sequence:  -min(R * A, clip(R, 1 - clip_low, 1 + clip_high) * A)

    A completion is one action: if pi is the old policy, it has the gradient of `-A * sum of log pi` over the
    tokens of a sequence, averaged over sequences. KL and entropy are means over a sequence's tokens, as in the other
    losses.

    Each branch of an episode is a separate action: R is over its tokens, and its sum over tokens weighs as much as
    the sum of an episode without branches. If pi is the old policy, splitting an episode changes no gradient.

    Args:
        clip_low, clip_high: bounds of the sequence's ratio. A product over more tokens leaves the bounds sooner: raise
            them for long answers, and watch `clip_fraction`.
        dual_clip: as in `GRPO`.
    """

    aggregation: ClassVar[Aggregation] = "sequence_mean"
    fixed_aggregation: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_in == "reward":
            # The reward of a sequence would need its KL before the other samples' mean is computed.
            raise ValueError("RLOO supports the KL in the loss only: omit kl_in")

    def advantages(self, rewards: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return A_i = r_i - mean of the other rewards of its group, for each reward."""
        return [leave_one_out(group) for group in rewards]

    def ratio(self, logprobs: Tensor, old_logprobs: Tensor, weights: Tensor, sequences: Tensor | None) -> Tensor:
        """Return for each token the ratio pi(y) / old(y) of its whole sequence y."""
        # The sum of logarithms is clamped as well: the product over a long sequence would overflow.
        logs = where_trained(log_ratio(logprobs, old_logprobs), weights)
        return over_tokens(sequence_sums(logs, sequences).clamp(-BOUND, BOUND), logs, sequences).exp()

    def __call__(  # type: ignore[override]
        self,
        logprobs: Tensor,
        behaviour_logprobs: Tensor,
        advantages: Tensor,
        weights: Tensor,
        ref_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
        proximal_logprobs: Tensor | None = None,
        sequences: Tensor | None = None,
        branch_shares: Tensor | None = None,
    ) -> Tensor:
        """Return the loss, a scalar, with the arguments of `Algorithm`.

        The weights of a branch's tokens add up to its share of the episode: `branch_shares`, by which the advantages
        are divided, make it count as a whole sequence.
        """
        if branch_shares is not None:
            advantages = advantages / branch_shares
        return super().__call__(
            logprobs, behaviour_logprobs, advantages, weights, ref_logprobs, entropy, proximal_logprobs, sequences
        )
