"""Group-relative policy optimisation: on-policy (`SimpleGRPOLoss`) and clipped off-policy (`GRPOLoss`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .common import importance_ratio, kl_k3, sequence_mean_weights, weighted_sum, where_trained
from .correction import Correction, correction_weights


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


class GRPOLoss(nn.Module):
    """GRPO with the clipped surrogate against the policy that sampled (eq. 3), and DAPO's separate upper bound.

        per token:  -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + beta * KL(pi || ref) - entropy_coef * H(pi)

    with `r = pi / behaviour`. `clip_high > clip_low` keeps exploration alive (Yu et al. 2025, DAPO, section 3.1).

    With a `correction` the policy that the step starts from takes the sampler's place in `r`, which is then 1 with the
    policy's gradient, and each token's surrogate is weighted by how likely it is under that policy against the
    sampler's: truncated at `correction_high`, or masked outside `correction_low` to `correction_high` (see
    `forge.losses.correction`; decoupled as in Hilton et al. 2022).
    """

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        correction: Correction = "none",
        correction_low: float = 0.5,
        correction_high: float = 2.0,
    ) -> None:
        super().__init__()
        if correction not in ("none", "truncate", "mask"):
            raise ValueError(f"correction must be none, truncate or mask, got {correction!r}")
        if not 0 <= correction_low < 1 <= correction_high:
            raise ValueError(
                f"correction_low must be in [0, 1) and correction_high at least 1, got {correction_low} and "
                f"{correction_high}"
            )
        if not 0 <= clip_low < 1 or clip_high < 0:
            raise ValueError(f"clip_low must be in [0, 1) and clip_high at least 0, got {clip_low} and {clip_high}")
        self.clip_low, self.clip_high, self.beta, self.entropy_coef = clip_low, clip_high, beta, entropy_coef
        self.correction, self.bounds = correction, (correction_low, correction_high)

    def forward(
        self,
        logprobs: Tensor,
        behaviour_logprobs: Tensor,
        advantages: Tensor,
        weights: Tensor,
        ref_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
    ) -> Tensor:
        """All tensors of one shape, [batch, seq] or [tokens]. Returns a scalar.

        Raises:
            ValueError: `beta` without `ref_logprobs`, or `entropy_coef` without `entropy`.
        """
        logprobs = where_trained(logprobs, weights)
        corrected = self.correction != "none"
        ratio = importance_ratio(logprobs, logprobs.detach() if corrected else behaviour_logprobs)
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        per_token = -torch.minimum(ratio * advantages, clipped * advantages)
        if corrected:
            per_token = per_token * correction_weights(logprobs, behaviour_logprobs, self.correction, *self.bounds)
        if self.beta:
            if ref_logprobs is None:
                raise ValueError("beta > 0 needs ref_logprobs: start a reference model, or set grpo.beta to 0")
            per_token = per_token + self.beta * kl_k3(logprobs, ref_logprobs)
        if self.entropy_coef:
            if entropy is None:
                raise ValueError("entropy_coef > 0 needs the policy's entropy")
            per_token = per_token - self.entropy_coef * entropy
        return weighted_sum(per_token, weights)

    @torch.no_grad()
    def metrics(self, logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        """Per token: 1 where the clip removed the gradient, or where the correction's bounds changed the weight."""
        ratio = importance_ratio(logprobs, behaviour_logprobs)
        if self.correction != "none":
            weight = correction_weights(logprobs, behaviour_logprobs, self.correction, *self.bounds)
            return {"correction_fraction": (weight != ratio).float()}
        high = (ratio > 1.0 + self.clip_high) & (advantages > 0)
        low = (ratio < 1.0 - self.clip_low) & (advantages < 0)
        return {"clip_fraction": (high | low).float()}
