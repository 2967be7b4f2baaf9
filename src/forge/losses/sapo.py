"""SAPO: a smooth gate in place of the clip."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .group import GroupLoss


class SAPOLoss(GroupLoss):
    """Soft adaptive policy optimisation (Gao et al. 2025, eq. 5 and 6).

        per token:  -(4 / tau) * sigmoid(tau * (r - 1)) * A,   tau = tau_positive where A > 0, else tau_negative

    The gradient fades as the ratio leaves 1 and is never cut off; at r = 1 it is that of r * A. A larger `tau_negative`
    lets tokens with negative advantages fade sooner, since these push probability to all other tokens at once.

    Args:
        tau_positive, tau_negative: temperatures of the gate, above 0.
        **more: of `GroupLoss`.

    Raises:
        ValueError: a temperature that is not above 0.
    """

    aggregation = "sequence_mean"

    def __init__(self, tau_positive: float = 1.0, tau_negative: float = 1.05, **more: Any) -> None:
        super().__init__(**more)
        if tau_positive <= 0 or tau_negative <= 0:
            raise ValueError(f"tau_positive and tau_negative must be above 0, got {tau_positive} and {tau_negative}")
        self.tau_positive, self.tau_negative = tau_positive, tau_negative

    def surrogate(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        tau = torch.where(advantages > 0, self.tau_positive, self.tau_negative).to(ratio.dtype)
        return 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantages
