"""GSPO: the importance ratio of a whole sequence."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .common import log_ratio, over_tokens, sequence_means, where_trained
from .grpo import GRPOLoss


class GSPOLoss(GRPOLoss):
    """Group sequence policy optimisation (Zheng et al. 2025, eq. 5 and 7; per token as in eq. 14).

        s = exp(mean over the sequence's tokens of log(pi / old)),  per token:  -min(s * A, clip(s) * A)

    The reward belongs to the sequence, so the clip takes or leaves a sequence as a whole. Each token's ratio has the
    value of `s` and the gradient of `s * log pi`, which is that of `s` where a sequence's tokens have one advantage and
    one weight. The bounds are much narrower than a token's, because a mean over tokens varies less.
    """

    aggregation = "sequence_mean"

    def __init__(self, clip_low: float = 3e-4, clip_high: float = 4e-4, **more: Any) -> None:
        super().__init__(clip_low, clip_high, **more)

    def ratio(self, logprobs: Tensor, old_logprobs: Tensor, weights: Tensor, sequences: Tensor | None) -> Tensor:
        logs = where_trained(log_ratio(logprobs.detach(), old_logprobs), weights)
        of_sequence = over_tokens(sequence_means(logs, weights, sequences), logs, sequences)
        return (of_sequence + logprobs - logprobs.detach()).exp()
