"""Bases that several papers share: PPO's clipped ratio, and rewards relative to the other samples of a prompt."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from .advantages import Std, check_std, group_relative
from .base import Algorithm
from .terms import beyond_clip, check_clip, clipped_surrogate


@dataclass(eq=False)
class Clipped(Algorithm):
    """An algorithm with PPO's clipped surrogate (Schulman et al. 2017, eq. 7).

        per token:  -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), at most -dual_clip * A where A < 0

    Args:
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: bound on the loss of a token with a negative advantage, see `terms.clipped_surrogate`; None: off.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    _: KW_ONLY
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clip(self.clip_low, self.clip_high, self.dual_clip)

    def token_loss(self, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """Return -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), bounded by `dual_clip` where A < 0."""
        return -clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)

    def clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Return a mask of the tokens whose gradient the clip removes."""
        return beyond_clip(ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)


@dataclass(eq=False)
class GroupRelative(Algorithm):
    """An algorithm whose advantages compare the samples of a prompt (Shao et al. 2024, DeepSeekMath, eq. 3).

        A_i = (r_i - mean(r)) / (std(r) + std_epsilon)  over the rewards r of a prompt's samples

    Args:
        normalize: divide by the standard deviation; False only subtracts the mean.
        std: "sample" divides by n - 1, "population" by n.
        std_epsilon: added to the deviation.
    """

    _: KW_ONLY
    normalize: bool = True
    std: Std = "sample"
    std_epsilon: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_std(self.std, self.std_epsilon)

    def advantages(self, rewards: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return A_i = (r_i - mean of the group) / (standard deviation + `std_epsilon`) for each reward, without the
        division if `normalize` is False."""
        return [group_relative(group, self.normalize, self.std_epsilon, self.std) for group in rewards]
