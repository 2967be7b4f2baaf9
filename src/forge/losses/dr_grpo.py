"""Dr.GRPO: GRPO without its two biases."""

from __future__ import annotations

from typing import Any

from .grpo import GRPOLoss


class DrGRPOLoss(GRPOLoss):
    """GRPO done right (Liu et al. 2025, "Understanding R1-Zero-like training", section 3).

        A_i = r_i - mean(r), and the sum over tokens divided by samples * horizon

    Not dividing by the deviation stops over-weighting prompts that are nearly all right or all wrong; a divisor that
    does not depend on a sample's length stops favouring short right and long wrong answers. The horizon is the most
    tokens a completion may have.
    """

    aggregation = "fixed_horizon"

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.2, *, normalize: bool = False, **more: Any) -> None:
        super().__init__(clip_low, clip_high, normalize=normalize, **more)
