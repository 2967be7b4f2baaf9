"""SAPO: a smooth gate instead of the clip."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Aggregation
from .clipped import GroupRelative


@dataclass(eq=False)
class SAPO(GroupRelative):
    """Soft adaptive policy optimisation (Gao et al. 2025, eq. 5 and 6).

        A_i = (r_i - mean(r)) / (std(r) + std_epsilon)  over the rewards r of a prompt's samples
        per token:  -(4 / tau) * sigmoid(tau * (ratio - 1)) * A,   tau = tau_positive where A > 0, else tau_negative

    The gradient fades as the ratio leaves 1 and is never cut off; at ratio 1 it equals the gradient of ratio * A. A
    larger `tau_negative` makes tokens with negative advantages fade sooner, since these push probability to all other
    tokens.

    Args:
        tau_positive, tau_negative: temperatures of the gate, above 0.
        normalize, std, std_epsilon: as in `GRPO`.
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    aggregation: ClassVar[Aggregation] = "sequence_mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.tau_positive < math.inf and 0 < self.tau_negative < math.inf):
            taus = f"{self.tau_positive} and {self.tau_negative}"
            raise ValueError(f"tau_positive and tau_negative must be above 0 and finite, got {taus}")

    def token_loss(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """Return -(4 / tau) * sigmoid(tau * (ratio - 1)) * A, where tau depends on the sign of A."""
        # Converted, as `where` of two Python numbers is float32 for a ratio of any dtype.
        tau = torch.where(advantages > 0, self.tau_positive, self.tau_negative).to(ratio.dtype)
        return -(4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantages)
