"""Dr.GRPO: GRPO without its two biases."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from .base import Aggregation
from .clipped import Clipped, GroupRelative


@dataclass(eq=False)
class DrGRPO(Clipped, GroupRelative):
    """GRPO done right (Liu et al. 2025, "Understanding R1-Zero-like training", section 3).

        A_i = r_i - mean(r)
        per token:  -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
        the sum over tokens is divided by samples * horizon

    Not dividing by the deviation stops over-weighting prompts that are nearly all right or all wrong. A divisor that
    does not depend on a sample's length stops favouring short right and long wrong answers; the horizon is the most
    tokens that a completion may have.

    Args:
        clip_low, clip_high, dual_clip, normalize, std, std_epsilon: as in `GRPO`.
    """

    _: KW_ONLY
    normalize: bool = False

    aggregation: ClassVar[Aggregation] = "fixed_horizon"
