"""On-policy distillation: the student samples, the teacher scores every token of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Algorithm
from .terms import log_ratio, weighted_gradient, where_trained


@dataclass(eq=False)
class Distill(Algorithm):
    """The reverse KL from student to teacher on the student's samples (Agarwal et al. 2024, GKD; Lu et al. 2025,
    "On-policy distillation"), by its policy gradient.

        A = stop_gradient(log teacher - log pi)  of each token
        per token:  -min(ratio, 1 + clip_high) * A * log pi

    The reward of each token is its own log(teacher / pi), without later tokens' rewards. In expectation over the
    student's tokens this is the gradient of KL(pi || teacher) at each position. The teacher is the reference model of
    the recipe; no other reward is needed.

    Args:
        clip_high: the importance weight of a token is at most 1 + clip_high.
    """

    clip_high: float = 1.0

    uses_rewards: ClassVar[bool] = False
    within_group = False
    needs_teacher: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.clip_high < math.inf:
            raise ValueError(f"clip_high must be at least 0 and finite, got {self.clip_high}")
        if self.beta or (self.kl, self.kl_in) != ("k3", "loss"):
            raise ValueError("distill supports no KL term other than the KL to the teacher: omit beta, kl and kl_in")

    def advantages(self, rewards: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return zeros: `__call__` computes the advantages of tokens from the two models instead."""
        return [[0.0 for _ in group] for group in rewards]

    def token_loss(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """Return -stop_gradient(min(ratio, 1 + clip_high)) * A * log pi, with A = log teacher - log pi."""
        return -weighted_gradient(ratio, logprobs, advantages, 1.0 + self.clip_high)

    def clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Return a mask of the tokens whose importance weight the bound changed."""
        return ratio > 1.0 + self.clip_high

    def __call__(  # type: ignore[override]
        self,
        logprobs: Tensor,
        behaviour_logprobs: Tensor,
        ref_logprobs: Tensor,
        weights: Tensor,
        entropy: Tensor | None = None,
        proximal_logprobs: Tensor | None = None,
        sequences: Tensor | None = None,
    ) -> Tensor:
        """Return the loss, a scalar. All tensors have one shape; `ref_logprobs` are the teacher's."""
        # Each token's advantage follows from the two models: the batch's is not read.
        advantages = where_trained(log_ratio(ref_logprobs, logprobs.detach()), weights)
        return super().__call__(
            logprobs,
            behaviour_logprobs,
            advantages,
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
        """Return the metrics of `Algorithm`, and `reverse_kl`: per token the student's log-probability less the
        teacher's (k1)."""
        reward = log_ratio(ref_logprobs, logprobs)
        metrics = super().metrics(logprobs, behaviour_logprobs, reward, weights, proximal_logprobs, sequences)
        return metrics | {"reverse_kl": -reward}
