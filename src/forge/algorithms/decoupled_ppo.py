"""Decoupled PPO: the policy that the step starts from, apart from the one that sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from .advantages import Std, check_std, group_relative
from .base import Algorithm
from .correction import Correction
from .terms import beyond_clip, check_clip, clipped_surrogate

# As AReaL caps it (Fu et al. 2025): tokens with a larger weight do not train.
CAPPED = Correction("mask", low=0.0, high=5.0)


@dataclass(eq=False)
class DecoupledPPO(Algorithm):
    """The decoupled objective (Hilton et al. 2022, "Batch size-invariance for policy optimization", eq. 6).

        A_i = (r_i - mean(r)) / (std(r) + std_epsilon)  over the rewards r of a prompt's samples
        per token:  -(pi_prox / pi_behaviour) * min(ratio * A, clip(ratio) * A),   ratio = pi / pi_prox

    The clip holds the policy near the proximal one, which the step starts from; the weight in front accounts for what
    sampled, however old that is. In a step of one update the ratio is 1 and the weight alone remains: the two policies
    are for several updates (`training.mini_batches`, `training.epochs`).

    Args:
        clip_low, clip_high, dual_clip, normalize, std, std_epsilon: as of `GRPO`.
        correction: the weight in front and its bounds; `Correction("truncate", high=inf)` is the paper's.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    _: KW_ONLY
    correction: Correction | None = CAPPED
    dual_clip: float | None = None
    normalize: bool = True
    std: Std = "sample"
    std_epsilon: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clip(self.clip_low, self.clip_high, self.dual_clip)
        check_std(self.std, self.std_epsilon)
        if self.correction is None:
            raise ValueError("decoupled PPO is its correction: choose another algorithm, or leave correction out")

    def advantages(self, rewards: Sequence[Sequence[float]]) -> list[list[float]]:
        """A_i = (r_i - mean of the group) / (standard deviation + `std_epsilon`), without the division where
        `normalize` is false."""
        return [group_relative(group, self.normalize, self.std_epsilon, self.std) for group in rewards]

    def token_loss(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), bounded by `dual_clip` where A < 0."""
        return -clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)

    def clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Where the clip removes the gradient."""
        return beyond_clip(ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)
