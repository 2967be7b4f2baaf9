"""PPO: a clipped policy, and a critic that says what was to be expected at each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .clipped import ClippedLoss
from .common import Estimator, weighted_sum, where_trained


class PPOLoss(ClippedLoss):
    """Proximal policy optimisation (Schulman et al. 2017, eq. 7), the policy's part.

        per token:  -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    `A` is generalised advantage estimation over the critic's values, whitened over the batch; the KL to the reference,
    if there is one, is in the reward of each token (Ziegler et al. 2019; Ouyang et al. 2022).

    Args:
        discount, trace: gamma and lambda of `forge.losses.gae`.
        **more: of `ClippedLoss`.

    Raises:
        ValueError: a discount or trace outside [0, 1].
    """

    within_group = False
    whiten = True
    needs_critic = True

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        *,
        discount: float = 1.0,
        trace: float = 0.95,
        kl: Estimator = "k1",
        kl_in: Literal["loss", "reward"] = "reward",
        **more: Any,
    ) -> None:
        super().__init__(clip_low, clip_high, kl=kl, kl_in=kl_in, **more)
        if not 0 <= discount <= 1 or not 0 <= trace <= 1:
            raise ValueError(f"discount and trace must be in [0, 1], got {discount} and {trace}")
        self.discount, self.trace = discount, trace

    def advantages(self, groups: Sequence[Sequence[float]]) -> list[list[float]]:
        """The rewards themselves: what becomes of them is the critic's part, see `forge.credit.assign`."""
        return [list(rewards) for rewards in groups]


class ValueLoss(nn.Module):
    """The critic's part: half the squared error to the returns, at least that of a value that moved by `clip` (Schulman
    et al. 2016, eq. 28, clipped as in the reference code of PPO; Engstrom et al. 2020, section 3).

        per token:  max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2

    Args:
        clip: how far a value may move from what it was in one step before its gradient ends; None is no bound.

    Raises:
        ValueError: `clip` not above 0.
    """

    def __init__(self, clip: float | None = 0.2) -> None:
        super().__init__()
        if clip is not None and clip <= 0:
            raise ValueError(f"clip must be None or above 0, got {clip}")
        self.clip = clip

    def forward(self, values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor) -> Tensor:
        """All tensors of one shape, [batch, seq] or packed [tokens]. Returns a scalar."""
        values, old, returns = (where_trained(x, weights) for x in (values, old_values, returns))
        error = (values - returns) ** 2
        if self.clip is not None:
            error = torch.maximum(error, (old + (values - old).clamp(-self.clip, self.clip) - returns) ** 2)
        return weighted_sum(0.5 * error, weights)

    @torch.no_grad()
    def metrics(self, values: Tensor, old_values: Tensor, returns: Tensor) -> dict[str, Tensor]:
        """Per token: squared `value_error`, and `clip_fraction`, 1 where a value moved further than `clip`."""
        bound = float("inf") if self.clip is None else self.clip
        return {
            "value": values,
            "value_error": (values - returns) ** 2,
            "clip_fraction": ((values - old_values).abs() > bound).float(),
        }
