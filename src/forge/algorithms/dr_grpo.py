"""Dr.GRPO: GRPO without its two biases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from torch import Tensor

from .advantages import Std, check_std, group_relative
from .base import Aggregation, Algorithm
from .terms import beyond_clip, check_clip, clipped_surrogate


@dataclass(eq=False)
class DrGRPO(Algorithm):
    """GRPO done right (Liu et al. 2025, "Understanding R1-Zero-like training", section 3).

        A_i = r_i - mean(r)
        per token:  -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
        the sum over tokens is divided by samples * horizon

    Not dividing by the deviation stops over-weighting prompts that are nearly all right or all wrong. A divisor that
    does not depend on a sample's length stops favouring short right and long wrong answers; the horizon is the most
    tokens that a completion may have.

    Args:
        clip_low, clip_high, dual_clip, normalize, std, std_epsilon: as of `GRPO`.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    _: KW_ONLY
    dual_clip: float | None = None
    normalize: bool = False
    std: Std = "sample"
    std_epsilon: float = 1e-4

    aggregation: ClassVar[Aggregation] = "fixed_horizon"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clip(self.clip_low, self.clip_high, self.dual_clip)
        check_std(self.std, self.std_epsilon)

    def advantages(self, rewards: Sequence[Sequence[float]]) -> list[list[float]]:
        """A_i = (r_i - mean of the group) / (standard deviation + `std_epsilon`), without the division where
        `normalize` is false."""
        return [group_relative(group, self.normalize, self.std_epsilon, self.std) for group in rewards]

    def token_loss(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), bounded by `dual_clip` where A < 0."""
        return -clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)

    def clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Where the clip removes the gradient."""
        return beyond_clip(ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)
