"""DRO: a squared log-ratio instead of an importance weight."""

import math
from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from .base import Algorithm


@dataclass(eq=False)
class DRO(Algorithm):
    """Direct reward optimisation (Richemond et al. 2024, arXiv:2405.19107, eq. 5; Kimi 2025, arXiv:2501.12599, eq. 3).

        A_i = (r_i - mean(r)) / (std(r) + 1e-4)  over the rewards r of a prompt's samples
        per token:  -(A * log pi - penalty / 2 * (log(pi / mu))^2)

    Without an importance weight samples of any policy mu train; the square keeps the policy near the one that sampled.

    Args:
        penalty: the papers' tau.
    """

    _: KW_ONLY
    penalty: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.penalty < math.inf:
            raise ValueError(f"penalty must be at least 0 and finite, got {self.penalty}")

    def token_loss(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """Return -(A * log pi - penalty / 2 * (log ratio)^2)."""
        return 0.5 * self.penalty * ratio.log() ** 2 - advantages * logprobs
