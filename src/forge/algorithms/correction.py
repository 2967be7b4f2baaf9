"""Importance weights for tokens that another policy sampled: engine and trainer differ by rounding, and by the steps
since then.

A weight multiplies a token's loss and passes no gradient. It is the ratio `pi / mu` of the policy that the step starts
from to the one that sampled, with bounds, because a few tokens with enormous ratios would otherwise decide the update.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .terms import BOUND, log_ratio, over_tokens, sequence_means, sequence_sums, where_trained

Kind = Literal["truncate", "mask"]
Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class Correction:
    """Importance weight of tokens, or of whole sequences, that another policy sampled.

    Args:
        kind: "truncate" is `min(ratio, high)`: bounded variance for some bias (Ionides 2008; Yao et al. 2025, TIS).
            "mask" is the ratio within [low, high] and 0 outside: such tokens do not train (Ling team 2025, IcePop, by
            token; MIS by sequence). The other tokens' shares of the loss stay the same.
        level: of the ratio. "token": each token's own. "sequence": the product over the sequence, the unbiased weight
            of a whole sequence. "geometric": its geometric mean over tokens, which does not grow with length. Each
            branch of an episode is a sequence.
        low: the lower bound of "mask".
        high: the upper bound.

    Raises:
        ValueError: an unknown kind or level; `low` outside [0, 1), or `high` below 1.
    """

    kind: Kind = "truncate"
    level: Level = "token"
    low: float = 0.5
    high: float = 2.0

    def __post_init__(self) -> None:
        if self.kind not in ("truncate", "mask"):
            raise ValueError(f"correction must be truncate or mask, got {self.kind!r}")
        if self.level not in ("token", "sequence", "geometric"):
            raise ValueError(f"correction_level must be token, sequence or geometric, got {self.level!r}")
        if not 0 <= self.low < 1 <= self.high:
            raise ValueError(
                f"correction_low must be in [0, 1) and correction_high at least 1, got {self.low} and {self.high}"
            )

    @torch.no_grad()
    def ratio(self, logprobs: Tensor, behaviour_logprobs: Tensor, weights: Tensor, sequences: Tensor | None) -> Tensor:
        """Return the ratio of each token, without bounds; see `terms` for `weights` and `sequences`.

        By `level` it is the token's own ratio, or the one of its sequence.
        """
        # Tokens that are not trained have the ratio 1, and do not change the ratio of their sequence.
        logs = where_trained(log_ratio(logprobs, behaviour_logprobs), weights)
        if self.level == "sequence":
            logs = over_tokens(sequence_sums(logs, sequences).clamp(-BOUND, BOUND), logs, sequences)
        elif self.level == "geometric":
            logs = over_tokens(sequence_means(logs, weights, sequences), logs, sequences)
        return logs.exp()

    def bounded(self, ratio: Tensor) -> Tensor:
        """Return `ratio`, of any shape, truncated or masked by the bounds."""
        if self.kind == "truncate":
            return ratio.clamp(max=self.high)
        return torch.where((ratio >= self.low) & (ratio <= self.high), ratio, torch.zeros_like(ratio))
