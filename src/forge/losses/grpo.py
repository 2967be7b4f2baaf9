"""Group-relative policy optimisation: on-policy (`SimpleGRPOLoss`) and clipped off-policy (`GRPOLoss`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .common import clipped_surrogate, kl_k3, sequence_mean_weights, weighted_sum, where_trained
from .policy import PolicyLoss


class SimpleGRPOLoss(nn.Module):
    """GRPO for batches that the current policy sampled (Shao et al. 2024, DeepSeekMath, eq. 3 at pi = pi_old).

        per token:  -(pi / stop_gradient(pi)) * advantage + beta * KL(pi || ref)

    averaged over the tokens of each sequence, then over sequences.
    """

    def __init__(self, beta: float = 0.1) -> None:
        super().__init__()
        self.beta = beta

    def forward(
        self,
        logprobs: Tensor,
        ref_logprobs: Tensor,
        advantages: Tensor,
        padding_mask: Tensor,
        weights: Tensor | None = None,
    ) -> Tensor:
        """All tensors [batch, seq]; `weights` replaces the default aggregation. Returns a scalar."""
        weights = sequence_mean_weights(padding_mask) if weights is None else weights
        logprobs = where_trained(logprobs, weights)
        ratio = torch.exp(logprobs - logprobs.detach())
        return weighted_sum(self.beta * kl_k3(logprobs, ref_logprobs) - ratio * advantages, weights)


class GRPOLoss(PolicyLoss):
    """GRPO with the clipped surrogate against the old policy (Shao et al. 2024, DeepSeekMath, eq. 3).

        per token:  -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + beta * KL(pi || ref) - entropy_coef * H(pi)

    `A` is the reward against the group's mean, over its standard deviation (`normalize`). The paper's aggregation is
    "sequence_mean"; the default here is "token_mean", as in most recipes since. `clip_high > clip_low` keeps
    exploration alive (Yu et al. 2025, DAPO, section 3.1).

    Args:
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: see `forge.losses.common.clipped_surrogate`; None is off.
        normalize: divide advantages by the group's standard deviation.
        **more: of `PolicyLoss`.

    Raises:
        ValueError: bounds that mean nothing.
    """

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        *,
        dual_clip: float | None = None,
        normalize: bool = True,
        **more: Any,
    ) -> None:
        super().__init__(beta=beta, entropy_coef=entropy_coef, **more)
        if not 0 <= clip_low < 1 or clip_high < 0:
            raise ValueError(f"clip_low must be in [0, 1) and clip_high at least 0, got {clip_low} and {clip_high}")
        if dual_clip is not None and dual_clip <= 1 + clip_high:
            raise ValueError(f"dual_clip must be above 1 + clip_high, got {dual_clip}")
        self.clip_low, self.clip_high, self.dual_clip, self.normalize = clip_low, clip_high, dual_clip, normalize

    def surrogate(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        return clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)

    def limited(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        high = (ratio > 1.0 + self.clip_high) & (advantages > 0)
        low = (ratio < 1.0 - self.clip_low) & (advantages < 0)
        return high | low if self.dual_clip is None else high | low | ((ratio > self.dual_clip) & (advantages < 0))
