"""CISPO: the importance weight is clipped, the gradient is not."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .common import weighted_gradient
from .group import GroupLoss


class CISPOLoss(GroupLoss):
    """Clipped importance-sampling policy optimisation (MiniMax 2025, MiniMax-M1, eq. 4).

        per token:  -stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) * A * log pi

    A token beyond the bounds still trains, with a bounded weight: rare tokens that turn an argument around keep their
    gradient, which a clipped surrogate takes from them.

    Args:
        clip_high: the weight is at most 1 + clip_high.
        clip_low: and at least 1 - clip_low; 1, the default, is no lower bound, as in the paper.
        **more: of `GroupLoss`.

    Raises:
        ValueError: bounds that mean nothing.
    """

    def __init__(self, clip_low: float = 1.0, clip_high: float = 4.0, **more: Any) -> None:
        super().__init__(**more)
        if not 0 <= clip_low <= 1 or clip_high < 0:
            raise ValueError(f"clip_low must be in [0, 1] and clip_high at least 0, got {clip_low} and {clip_high}")
        self.clip_low, self.clip_high = clip_low, clip_high

    def surrogate(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        return weighted_gradient(ratio, logprobs, advantages, 1.0 + self.clip_high, 1.0 - self.clip_low)

    def limited(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        return (ratio > 1.0 + self.clip_high) | (ratio < 1.0 - self.clip_low)
