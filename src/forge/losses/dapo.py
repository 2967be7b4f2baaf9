"""DAPO: clip higher, every token the same weight, only prompts that teach something."""

from __future__ import annotations

from typing import Any

from .grpo import GRPOLoss


class DAPOLoss(GRPOLoss):
    """Decoupled clip and dynamic sampling (Yu et al. 2025, eq. 8), with the dual clip of its reference code.

        per token:  -min(r * A, clip(r, 1 - 0.2, 1 + 0.28) * A), and where A < 0 not above -10 * A

    Three of its four parts are not in the loss: prompts whose samples are all right or all wrong are replaced
    (`dynamic_sampling`, section 3.2), every token counts the same (section 3.3), and answers that come near the limit
    of length lose reward (`forge.data.rewards.overlong_penalty`, section 3.4).

    Args:
        dynamic_sampling: at most so many prompts are replaced for each one of a batch.
    """

    aggregation = "token_mean"

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        *,
        dual_clip: float | None = 10.0,
        dynamic_sampling: int = 10,
        **more: Any,
    ) -> None:
        super().__init__(clip_low, clip_high, dual_clip=dual_clip, **more)
        if dynamic_sampling < 0:
            raise ValueError(f"dynamic_sampling must be at least 0, got {dynamic_sampling}")
        self.dynamic_sampling = dynamic_sampling
