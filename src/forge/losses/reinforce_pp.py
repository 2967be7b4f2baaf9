"""REINFORCE++: no critic, advantages normalised over the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from .clipped import ClippedLoss
from .common import Estimator


class ReinforcePlusPlusLoss(ClippedLoss):
    """REINFORCE++ (Hu et al. 2025), with and without a group baseline.

        per token:  -min(r * A, clip(r) * A),   A_t = whiten(reward - baseline - beta * sum from t on of k1)

    The KL to the reference is in the reward of each token (`beta`), advantages are brought to mean 0 and deviation 1
    over all tokens of the batch, and the surrogate is PPO's. A prompt needs only one sample.

    Args:
        group_baseline: take the mean of a prompt's samples from its rewards first (the paper's REINFORCE++-baseline,
            which then has its KL in the loss by k2).
        kl, kl_in: None is what the paper has with and without the baseline.
        **more: of `ClippedLoss`.
    """

    within_group = False
    whiten = True

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        *,
        group_baseline: bool = False,
        kl: Estimator | None = None,
        kl_in: Literal["loss", "reward"] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(
            clip_low,
            clip_high,
            kl=kl or ("k2" if group_baseline else "k1"),
            kl_in=kl_in or ("loss" if group_baseline else "reward"),
            **more,
        )
        self.group_baseline = self.within_group = group_baseline

    def advantages(self, groups: Sequence[Sequence[float]]) -> list[list[float]]:
        baselines = [sum(group) / len(group) if self.group_baseline else 0.0 for group in groups]
        return [[reward - baseline for reward in group] for group, baseline in zip(groups, baselines, strict=True)]
