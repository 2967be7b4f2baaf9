"""Group-relative policy optimisation: on-policy (`SimpleGRPOLoss`) and clipped off-policy (`GRPOLoss`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .clipped import ClippedLoss
from .common import kl_k3, sequence_mean_weights, weighted_sum, where_trained
from .group import GroupLoss


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


class GRPOLoss(ClippedLoss, GroupLoss):
    """GRPO with the clipped surrogate against the old policy (Shao et al. 2024, DeepSeekMath, eq. 3).

        per token:  -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + beta * KL(pi || ref) - entropy_coef * H(pi)

    `A` is the reward against the group's mean, over its standard deviation (`GroupLoss`). The paper's aggregation is
    "sequence_mean"; the default here is "token_mean", as in most recipes since. `clip_high > clip_low` keeps
    exploration alive (Yu et al. 2025, DAPO, section 3.1).

    Args:
        clip_low, clip_high: of `ClippedLoss`.
        beta, entropy_coef: of `PolicyLoss`.
        **more: of these two and `GroupLoss`.
    """

    def __init__(
        self, clip_low: float = 0.2, clip_high: float = 0.2, beta: float = 0.0, entropy_coef: float = 0.0, **more: Any
    ) -> None:
        super().__init__(clip_low, clip_high, beta=beta, entropy_coef=entropy_coef, **more)
