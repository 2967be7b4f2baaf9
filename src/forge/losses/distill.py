"""On-policy distillation: the student writes, the teacher says how likely each token would have been to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .common import log_ratio, weighted_gradient, where_trained
from .correction import Correction
from .policy import PolicyLoss


class DistillLoss(PolicyLoss):
    """The reverse KL from student to teacher on what the student wrote (Agarwal et al. 2024, GKD; Lu et al. 2025,
    "On-policy distillation"), by its policy gradient.

        per token:  -min(pi / behaviour, 1 + clip_high) * stop_gradient(log teacher - log pi) * log pi

    Each token is judged by itself: it has the reward log(teacher / pi) and no part in what comes after it. In
    expectation over the student's tokens this is the gradient of KL(pi || teacher) at each position. The teacher is
    the reference model of the recipe; no other reward is needed.

    Args:
        clip_high: the importance weight of a token is at most 1 + clip_high.
        entropy_coef, correction: of `PolicyLoss`.
    """

    uses_rewards = False
    within_group = False
    needs_teacher = True

    def __init__(
        self, clip_high: float = 1.0, *, entropy_coef: float = 0.0, correction: Correction | None = None
    ) -> None:
        super().__init__(entropy_coef=entropy_coef, correction=correction)
        if clip_high < 0:
            raise ValueError(f"clip_high must be at least 0, got {clip_high}")
        self.clip_high = clip_high

    def advantages(self, groups: Sequence[Sequence[float]]) -> list[list[float]]:
        """Rewards play no part: zeros, which `forward` does not read."""
        return [[0.0 for _ in group] for group in groups]

    def surrogate(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        return weighted_gradient(ratio, logprobs, advantages, 1.0 + self.clip_high)

    def limited(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        return ratio > 1.0 + self.clip_high

    def forward(  # type: ignore[override]
        self,
        logprobs: Tensor,
        behaviour_logprobs: Tensor,
        ref_logprobs: Tensor,
        weights: Tensor,
        entropy: Tensor | None = None,
        proximal_logprobs: Tensor | None = None,
        sequences: Tensor | None = None,
    ) -> Tensor:
        """All tensors of one shape; `ref_logprobs` are the teacher's. Returns a scalar."""
        reward = where_trained(log_ratio(ref_logprobs, logprobs.detach()), weights)
        return super().forward(
            logprobs,
            behaviour_logprobs,
            reward,
            weights,
            entropy=entropy,
            proximal_logprobs=proximal_logprobs,
            sequences=sequences,
        )

    @torch.no_grad()
    def metrics(  # type: ignore[override]
        self,
        logprobs: Tensor,
        behaviour_logprobs: Tensor,
        ref_logprobs: Tensor,
        weights: Tensor,
        proximal_logprobs: Tensor | None = None,
        sequences: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Per token, as every policy's, and `reverse_kl`: the student's log-probability less the teacher's (k1)."""
        reward = log_ratio(ref_logprobs, logprobs)
        found = super().metrics(logprobs, behaviour_logprobs, reward, weights, proximal_logprobs, sequences)
        return found | {"reverse_kl": -reward}
