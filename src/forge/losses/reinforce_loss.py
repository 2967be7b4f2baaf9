"""REINFORCE with an optional truncated importance weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from ..advantages import against_batch
from .common import token_mean_weights, weighted_gradient
from .policy import PolicyLoss


class ReinforceLoss(PolicyLoss):
    """Policy gradient (Williams 1992), corrected for the policy that sampled.

        per token:  -stop_gradient(min(pi / behaviour, 1 + clip_ratio)) * A * log pi

    averaged over trained tokens. The weight is truncated, not the surrogate: unlike PPO's clip, a token beyond the
    bound still has a gradient (Espeholt et al. 2018, IMPALA, the rho bar of section 4.1). In a recipe `A` is the reward
    less a baseline.

    Args:
        clip_ratio: how far above 1 the weight may go; None takes every sample as on-policy (weight 1).
        baseline: "batch" is the mean reward of the batch, "none" is 0.
        **more: of `PolicyLoss`.
    """

    within_group = False

    def __init__(
        self, clip_ratio: float | None = None, *, baseline: Literal["batch", "none"] = "batch", **more: Any
    ) -> None:
        super().__init__(**more)
        if baseline not in ("batch", "none"):
            raise ValueError(f"baseline must be batch or none, got {baseline!r}")
        if clip_ratio is not None and clip_ratio < 0:
            raise ValueError(f"clip_ratio must be None or at least 0, got {clip_ratio}")
        self.clip_ratio, self.baseline = clip_ratio, baseline
        self.on_policy = clip_ratio is None and self.correction is None

    def advantages(self, groups: Sequence[Sequence[float]]) -> list[list[float]]:
        return against_batch(groups) if self.baseline == "batch" else [list(group) for group in groups]

    def surrogate(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        if self.clip_ratio is None:
            return advantages * logprobs
        return weighted_gradient(ratio, logprobs, advantages, 1.0 + self.clip_ratio)

    def limited(self, ratio: Tensor, advantages: Tensor) -> Tensor | None:
        return None if self.clip_ratio is None else ratio > 1.0 + self.clip_ratio

    def forward(  # type: ignore[override]
        self,
        logprobs: Tensor,
        ref_logprobs: Tensor,
        advantages: Tensor,
        padding_mask: Tensor,
        weights: Tensor | None = None,
        behaviour_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
        proximal_logprobs: Tensor | None = None,
        sequences: Tensor | None = None,
    ) -> Tensor:
        """All tensors of one shape. The policy that sampled is `behaviour_logprobs`, or else `ref_logprobs`. Returns a
        scalar."""
        return super().forward(
            logprobs,
            ref_logprobs if behaviour_logprobs is None else behaviour_logprobs,
            advantages,
            token_mean_weights(padding_mask) if weights is None else weights,
            ref_logprobs,
            entropy,
            proximal_logprobs,
            sequences,
        )
