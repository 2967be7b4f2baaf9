"""CISPO: the importance weight is clipped, the gradient is not."""

import math
from dataclasses import dataclass

from torch import Tensor

from .clipped import GroupRelative
from .terms import weighted_gradient


@dataclass(eq=False)
class CISPO(GroupRelative):
    """Clipped importance-sampling policy optimisation (MiniMax 2025, MiniMax-M1, eq. 4).

        A_i = (r_i - mean(r)) / (std(r) + std_epsilon)  over the rewards r of a prompt's samples
        per token:  -stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * log pi

    A token beyond the bounds still trains, with a bounded weight: rare tokens that turn an argument around keep their
    gradient, which a clipped surrogate removes.

    Args:
        clip_low: the weight is at least 1 - clip_low; 1 means no lower bound, as in the paper.
        clip_high: the weight is at most 1 + clip_high.
        normalize, std, std_epsilon: as in `GRPO`.
    """

    clip_low: float = 1.0
    clip_high: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        # Unlike a clipped surrogate's, the lower bound may be 0: no bound.
        if not (0 <= self.clip_low <= 1 and 0 <= self.clip_high < math.inf):
            raise ValueError(
                "clip_low must be in [0, 1], and clip_high at least 0 and finite, got "
                f"{self.clip_low} and {self.clip_high}"
            )

    def token_loss(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """Return -stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * log pi."""
        return -weighted_gradient(ratio, logprobs, advantages, 1.0 + self.clip_high, 1.0 - self.clip_low)

    def clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Return a mask of the tokens whose importance weight a bound changed; they keep a gradient."""
        return (ratio > 1.0 + self.clip_high) | (ratio < 1.0 - self.clip_low)
