"""The clipped surrogate of PPO, which most losses share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .common import clipped_surrogate
from .policy import PolicyLoss


class ClippedLoss(PolicyLoss):
    """Per token `-min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)` (Schulman et al. 2017, eq. 7).

    `clip_fraction` is the share of tokens from which a bound took the gradient.

    Args:
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: see `forge.losses.common.clipped_surrogate`; None is off.
        **more: of `PolicyLoss`.

    Raises:
        ValueError: bounds that mean nothing.
    """

    def __init__(
        self, clip_low: float = 0.2, clip_high: float = 0.2, *, dual_clip: float | None = None, **more: Any
    ) -> None:
        super().__init__(**more)
        if not 0 <= clip_low < 1 or clip_high < 0:
            raise ValueError(f"clip_low must be in [0, 1) and clip_high at least 0, got {clip_low} and {clip_high}")
        if dual_clip is not None and dual_clip <= 1 + clip_high:
            raise ValueError(f"dual_clip must be above 1 + clip_high, got {dual_clip}")
        self.clip_low, self.clip_high, self.dual_clip = clip_low, clip_high, dual_clip

    def surrogate(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        return clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)

    def limited(self, ratio: Tensor, advantages: Tensor) -> Tensor | None:
        high = (ratio > 1.0 + self.clip_high) & (advantages > 0)
        low = (ratio < 1.0 - self.clip_low) & (advantages < 0)
        return high | low if self.dual_clip is None else high | low | ((ratio > self.dual_clip) & (advantages < 0))
