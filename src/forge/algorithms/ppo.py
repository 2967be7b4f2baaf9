"""PPO: a clipped policy, and a critic that predicts the return at each token."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .clipped import Clipped
from .terms import Estimator, weighted_sum, where_trained


@dataclass(eq=False)
class PPO(Clipped):
    """Proximal policy optimisation (Schulman et al. 2017, eq. 7): the loss of the policy.

        A = whiten(GAE over the critic's values)
        per token:  -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    The KL to the reference, if there is one, is in the reward of each token (Ziegler et al. 2019; Ouyang et al. 2022).

    Args:
        clip_low, clip_high, dual_clip: as in `GRPO`.
        discount, trace: gamma and lambda of `forge.algorithms.gae`.
    """

    _: KW_ONLY
    discount: float = 1.0
    trace: float = 0.95
    kl: Estimator = "k1"
    kl_in: Literal["loss", "reward"] = "reward"

    within_group = False
    whiten: ClassVar[bool] = True
    needs_critic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.discount <= 1 or not 0 <= self.trace <= 1:
            raise ValueError(f"discount and trace must be in [0, 1], got {self.discount} and {self.trace}")

    def advantages(self, rewards: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return the rewards: `forge.training.credit.assign_credit` computes advantages with the critic's values."""
        return [list(group) for group in rewards]


@dataclass(eq=False)
class ValueLoss:
    """The loss of the critic: half the squared error to the returns, clipped (Schulman et al. 2016, eq. 28, clipped as
    in the reference code of PPO; Engstrom et al. 2020, section 3).

        per token:  max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2

    Args:
        clip: how far a value may move in one step before its gradient ends; None: no bound.

    Raises:
        ValueError: `clip` not above 0.
    """

    clip: float | None = 0.2

    def __post_init__(self) -> None:
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"clip must be None or above 0, and finite, got {self.clip}")

    def __call__(self, values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor) -> Tensor:
        """Return the loss, a scalar. All tensors have one shape, [batch, seq] or packed [tokens]."""
        values, old, returns = (where_trained(x, weights) for x in (values, old_values, returns))
        # A value that moved too far has the larger of the two errors, and no gradient.
        error = (values - returns) ** 2
        if self.clip is not None:
            error = torch.maximum(error, (old + (values - old).clamp(-self.clip, self.clip) - returns) ** 2)
        return weighted_sum(0.5 * error, weights)

    @torch.no_grad()
    def metrics(self, values: Tensor, old_values: Tensor, returns: Tensor) -> dict[str, Tensor]:
        """Return metrics by name, one number per token: `value`, the squared `value_error`, and `clip_fraction`, 1
        where a value moved by more than `clip`."""
        bound = float("inf") if self.clip is None else self.clip
        return {
            "value": values,
            "value_error": (values - returns) ** 2,
            "clip_fraction": ((values - old_values).abs() > bound).float(),
        }
