"""What losses of the policy gradient share: the ratio, the correction for what sampled, KL, entropy, aggregation."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import torch
from torch import Tensor

from .algorithm import Algorithm
from .common import Estimator, importance_ratio, kl, weighted_sum, where_trained
from .correction import Correction


class PolicyLoss(Algorithm):
    """A policy-gradient loss over tokens.

        sum of weights * (-correction * surrogate(ratio, A) + beta * KL(pi || ref) - entropy_coef * H(pi))

    `ratio` is `pi / old`. The old policy is what sampled. With a `correction` it is the proximal policy, which the step
    starts from, and the correction weighs that against what sampled (decoupled as in Hilton et al. 2022); the first
    update of a step then has a ratio of 1 everywhere.

    Args:
        beta: weight of the KL to a frozen reference.
        kl: its estimator, see `forge.losses.common.kl`.
        kl_in: "loss" adds it here; "reward" leaves it to who makes the advantages (`forge.credit.assign`).
        entropy_coef: weight of the entropy bonus.
        correction: for tokens that another policy sampled; None takes them as they are.

    Raises:
        ValueError: a negative coefficient, an unknown estimator or place.
    """

    def __init__(
        self,
        *,
        beta: float = 0.0,
        kl: Estimator = "k3",
        kl_in: Literal["loss", "reward"] = "loss",
        entropy_coef: float = 0.0,
        correction: Correction | None = None,
    ) -> None:
        super().__init__()
        if beta < 0 or entropy_coef < 0:
            raise ValueError(f"beta must be at least 0, and so must entropy_coef, got {beta} and {entropy_coef}")
        if not isinstance(correction, Correction | None):
            raise ValueError(f"correction must be a Correction (grpo.correction in the YAML), got {correction!r}")
        if kl not in ("k1", "k2", "k3"):
            raise ValueError(f"kl must be k1, k2 or k3, got {kl!r}")
        if kl_in not in ("loss", "reward"):
            raise ValueError(f"kl_in must be loss or reward, got {kl_in!r}")
        self.beta, self.kl, self.kl_in, self.entropy_coef, self.correction = beta, kl, kl_in, entropy_coef, correction

    @abstractmethod
    def surrogate(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """The objective of each token, to be maximised; all tensors of one shape."""

    def ratio(self, logprobs: Tensor, old_logprobs: Tensor, weights: Tensor, sequences: Tensor | None) -> Tensor:
        """`pi / old` of each token; an algorithm may take a whole sequence's."""
        return importance_ratio(logprobs, old_logprobs)

    def limited(self, ratio: Tensor, advantages: Tensor) -> Tensor | None:
        """Where a bound took the gradient away or cut its weight; bool, of one shape with both. None: no bounds."""
        return None

    def forward(
        self,
        logprobs: Tensor,
        behaviour_logprobs: Tensor,
        advantages: Tensor,
        weights: Tensor,
        ref_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
        proximal_logprobs: Tensor | None = None,
        sequences: Tensor | None = None,
    ) -> Tensor:
        """All tensors of one shape, [batch, seq] or packed [tokens]; `sequences` is needed where tokens are packed and
        something is taken over sequences. `proximal_logprobs` None is the policy itself. Returns a scalar.

        Raises:
            ValueError: `beta` without `ref_logprobs`, or `entropy_coef` without `entropy`.
        """
        logprobs, advantages = where_trained(logprobs, weights), where_trained(advantages, weights)
        behaviour = where_trained(behaviour_logprobs, weights)
        old = self._old(logprobs, behaviour, proximal_logprobs, weights)
        per_token = -self.surrogate(self.ratio(logprobs, old, weights, sequences), logprobs, advantages)
        if self.correction is not None:
            apart = self.correction.ratio(old, behaviour, weights, sequences)
            per_token = per_token * self.correction.bounded(apart)
        if self.beta and self.kl_in == "loss":
            if ref_logprobs is None:
                raise ValueError("beta > 0 needs ref_logprobs: start a reference model, or set grpo.beta to 0")
            per_token = per_token + self.beta * kl(logprobs, where_trained(ref_logprobs, weights), self.kl)
        if self.entropy_coef:
            if entropy is None:
                raise ValueError("entropy_coef > 0 needs the policy's entropy")
            per_token = per_token - self.entropy_coef * where_trained(entropy, weights)
        return weighted_sum(per_token, weights)

    @torch.no_grad()
    def metrics(
        self,
        logprobs: Tensor,
        behaviour_logprobs: Tensor,
        advantages: Tensor,
        weights: Tensor,
        proximal_logprobs: Tensor | None = None,
        sequences: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Per token, 1 or 0. `clip_fraction`: a bound of the loss took the gradient away or cut its weight.
        `correction_fraction`: the correction's bounds changed the weight."""
        old = self._old(logprobs, behaviour_logprobs, proximal_logprobs, weights)
        ratio = self.ratio(logprobs, old, weights, sequences)
        limited = self.limited(ratio, advantages)
        found = {} if limited is None else {"clip_fraction": limited.float()}
        if self.correction is not None:
            apart = self.correction.ratio(old, behaviour_logprobs, weights, sequences)
            found["correction_fraction"] = (self.correction.bounded(apart) != apart).float()
        return found

    def _old(self, logprobs: Tensor, behaviour: Tensor, proximal: Tensor | None, weights: Tensor) -> Tensor:
        if self.correction is None:
            return behaviour
        return logprobs.detach() if proximal is None else where_trained(proximal, weights)
