"""Decoupled PPO: the policy that the step starts from, apart from the one that sampled."""

from __future__ import annotations

from typing import Any

from .correction import Correction
from .grpo import GRPOLoss

# As AReaL caps it (Fu et al. 2025): tokens with a larger weight do not train.
CAPPED = Correction("mask", low=0.0, high=5.0)


class DecoupledPPOLoss(GRPOLoss):
    """The decoupled objective (Hilton et al. 2022, "Batch size-invariance for policy optimization", eq. 6).

        per token:  -(pi_prox / pi_behaviour) * min(r * A, clip(r) * A),   r = pi / pi_prox

    The clip holds the policy near the proximal one, which the step starts from; the weight in front accounts for what
    sampled, however old that is. In a step of one update `r` is 1 and the weight alone remains: several updates
    (`training.mini_batches`, `training.epochs`) are what the two policies are for.

    Args:
        correction: the weight in front and its bounds; `Correction("truncate", high=inf)` is the paper's.
        **more: of `GRPOLoss`.

    Raises:
        ValueError: no correction: that is GRPO's loss.
    """

    def __init__(
        self, clip_low: float = 0.2, clip_high: float = 0.2, *, correction: Correction | None = CAPPED, **more: Any
    ) -> None:
        super().__init__(clip_low, clip_high, correction=correction, **more)
        if correction is None:
            raise ValueError("decoupled PPO is its correction: choose another algorithm, or leave correction out")
