"""REINFORCE with an optional truncated importance weight."""

from __future__ import annotations

from torch import Tensor, nn

from .common import importance_ratio, token_mean_weights, weighted_sum, where_trained


class ReinforceLoss(nn.Module):
    """Policy gradient (Williams 1992), corrected for the policy that sampled.

        per token:  -stop_gradient(min(pi / behaviour, 1 + clip_ratio)) * advantage * log pi

    averaged over trained tokens. The weight is truncated, not the surrogate: unlike PPO's clip, a token beyond the
    bound still has a gradient (Espeholt et al. 2018, IMPALA, the rho bar of section 4.1).

    Args:
        clip_ratio: how far above 1 the weight may go; None takes every sample as on-policy (weight 1).
    """

    def __init__(self, clip_ratio: float | None = None) -> None:
        super().__init__()
        if clip_ratio is not None and clip_ratio < 0:
            raise ValueError(f"clip_ratio must be None or at least 0, got {clip_ratio}")
        self.clip_ratio = clip_ratio

    def forward(
        self,
        logprobs: Tensor,
        ref_logprobs: Tensor,
        advantages: Tensor,
        padding_mask: Tensor,
        weights: Tensor | None = None,
        behaviour_logprobs: Tensor | None = None,
    ) -> Tensor:
        """All tensors of one shape. The policy that sampled is `behaviour_logprobs`, or else `ref_logprobs`. Returns a
        scalar."""
        weights = token_mean_weights(padding_mask) if weights is None else weights
        logprobs = where_trained(logprobs, weights)
        per_token = -advantages * logprobs
        if self.clip_ratio is not None:
            sampled = ref_logprobs if behaviour_logprobs is None else behaviour_logprobs
            ratio = importance_ratio(logprobs, sampled).detach()
            per_token = per_token * ratio.clamp(max=1.0 + self.clip_ratio)
        return weighted_sum(per_token, weights)
