"""REINFORCE with an optional truncated importance weight."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from torch import Tensor

from .advantages import against_batch
from .base import Algorithm
from .terms import token_mean_weights, weighted_gradient


@dataclass(eq=False)
class Reinforce(Algorithm):
    """Policy gradient (Williams 1992), corrected for the policy that sampled.

        A_i = r_i - mean of the batch's rewards
        per token:  -stop_gradient(min(ratio, 1 + clip_ratio)) * A * log pi

    averaged over trained tokens. The weight is truncated, not the surrogate: unlike PPO's clip, a token beyond the
    bound still has a gradient (Espeholt et al. 2018, IMPALA, the rho bar of section 4.1).

    Args:
        clip_ratio: the weight is at most 1 + clip_ratio; None treats every sample as on-policy (weight 1).
        baseline: "batch" is the mean reward of the batch, "none" is 0.
    """

    clip_ratio: float | None = None
    _: KW_ONLY
    baseline: Literal["batch", "none"] = "batch"

    within_group = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.baseline not in ("batch", "none"):
            raise ValueError(f"baseline must be batch or none, got {self.baseline!r}")
        if self.clip_ratio is not None and not 0 <= self.clip_ratio < math.inf:
            raise ValueError(f"clip_ratio must be None or at least 0, and finite, got {self.clip_ratio}")
        self.on_policy = self.clip_ratio is None and self.correction is None

    def advantages(self, rewards: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return the rewards, less the mean of the batch if `baseline` is "batch"."""
        return against_batch(rewards) if self.baseline == "batch" else [list(group) for group in rewards]

    def token_loss(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """Return -A * log pi of each token; with a `clip_ratio`, times the constant min(ratio, 1 + clip_ratio)."""
        # Without a bound every sample counts as on-policy, and the weight is 1.
        if self.clip_ratio is None:
            return -(advantages * logprobs)
        return -weighted_gradient(ratio, logprobs, advantages, 1.0 + self.clip_ratio)

    def clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor | None:
        """Return a mask of the tokens whose importance weight the bound changed; None without `clip_ratio`."""
        return None if self.clip_ratio is None else ratio > 1.0 + self.clip_ratio

    def __call__(  # type: ignore[override]
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
        """Return the loss, a scalar. All tensors have one shape. Without `behaviour_logprobs` the policy that sampled
        is the one of `ref_logprobs`."""
        return super().__call__(
            logprobs,
            ref_logprobs if behaviour_logprobs is None else behaviour_logprobs,
            advantages,
            token_mean_weights(padding_mask) if weights is None else weights,
            ref_logprobs,
            entropy,
            proximal_logprobs,
            sequences,
        )
