"""RLOO: REINFORCE on whole sequences, each sample against the mean of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..advantages import leave_one_out
from .clipped import ClippedLoss
from .common import BOUND, log_ratio, over_tokens, sequence_sums, where_trained


class RLOOLoss(ClippedLoss):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, "Back to basics", eq. 7), clipped for samples that are not fresh.

        per sequence:  -min(R * A, clip(R, 1 - clip_low, 1 + clip_high) * A),   R = product over tokens of pi / old

    `A` is the reward against the mean of the prompt's other samples. A completion is one action: where pi is the old
    policy the gradient is that of `-A * sum of log pi`, the mean over sequences of sums over tokens. KL and entropy are
    means over a sequence's tokens, as in the other losses.

    Args:
        clip_low, clip_high: of the sequence's ratio. A product over tokens leaves the bounds sooner the longer it is:
            raise them for long answers, and watch `clip_fraction`.
        **more: of `ClippedLoss`.

    Raises:
        ValueError: `kl_in` "reward": the KL of a whole sequence would have to be there before the leave-one-out.
    """

    aggregation = "sequence_mean"
    fixed_aggregation = True

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.2, **more: Any) -> None:
        super().__init__(clip_low, clip_high, **more)
        if self.kl_in == "reward":
            raise ValueError("RLOO has its KL in the loss: leave kl_in out")

    def advantages(self, groups: Sequence[Sequence[float]]) -> list[list[float]]:
        return [leave_one_out(rewards) for rewards in groups]

    def ratio(self, logprobs: Tensor, old_logprobs: Tensor, weights: Tensor, sequences: Tensor | None) -> Tensor:
        logs = where_trained(log_ratio(logprobs, old_logprobs), weights)
        return over_tokens(sequence_sums(logs, sequences).clamp(-BOUND, BOUND), logs, sequences).exp()
