"""Advantages within a group: each sample of a prompt against the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from ..advantages import group_relative
from .policy import PolicyLoss


class GroupLoss(PolicyLoss):
    """`A_i = (r_i - mean) / (std + epsilon)` over the rewards of a prompt's samples (Shao et al. 2024, section 4.1.2).

    Args:
        normalize: divide by the standard deviation; False only takes the mean off.
        std: "sample" estimates the deviation of the samples' source (n - 1), "population" is that of the samples (n).
        std_epsilon: added to the deviation.
        **more: of `PolicyLoss`.

    Raises:
        ValueError: an unknown `std`, or an epsilon below 0.
    """

    def __init__(
        self,
        *,
        normalize: bool = True,
        std: Literal["sample", "population"] = "sample",
        std_epsilon: float = 1e-4,
        **more: Any,
    ) -> None:
        super().__init__(**more)
        if std not in ("sample", "population") or std_epsilon < 0:
            raise ValueError(f"std must be sample or population and std_epsilon at least 0, got {std}, {std_epsilon}")
        self.normalize, self.std, self.std_epsilon = normalize, std, std_epsilon

    def advantages(self, groups: Sequence[Sequence[float]]) -> list[list[float]]:
        population = self.std == "population"
        return [
            group_relative(rewards, normalize=self.normalize, epsilon=self.std_epsilon, population=population)
            for rewards in groups
        ]
