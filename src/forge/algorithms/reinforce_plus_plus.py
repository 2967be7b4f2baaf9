"""REINFORCE++: no critic, advantages normalised over the whole batch."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

from .advantages import against_batch
from .clipped import Clipped
from .terms import Estimator


@dataclass(eq=False)
class ReinforcePlusPlus(Clipped):
    """REINFORCE++ (Hu et al. 2025), with and without a group baseline.

        A_t = whiten(r - baseline - beta * sum from t on of log(pi / ref))  over all tokens of the batch
        per token:  -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    The KL to the reference is in the reward of each token, advantages are whitened over the batch, and the surrogate
    is PPO's. A prompt needs only one sample.

    Args:
        clip_low, clip_high, dual_clip: as in `GRPO`.
        group_baseline: subtract the mean of a prompt's samples from its rewards first (the paper's
            REINFORCE++-baseline, which then has its KL in the loss by k2).
        kl, kl_in: as in `Algorithm`; None: the paper's choice, k2 in the loss with the group baseline, else k1 in the
            reward.
    """

    _: KW_ONLY
    group_baseline: bool = False
    kl: Estimator | None = None  # type: ignore[assignment]
    kl_in: Literal["loss", "reward"] | None = None  # type: ignore[assignment]

    whiten: ClassVar[bool] = True

    def __post_init__(self) -> None:
        # None is replaced before `Algorithm` checks the settings.
        self.kl = self.kl or ("k2" if self.group_baseline else "k1")
        self.kl_in = self.kl_in or ("loss" if self.group_baseline else "reward")
        self.within_group = self.group_baseline
        super().__post_init__()

    def advantages(self, rewards: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return the rewards, less the mean of their group if `group_baseline` is set; they are whitened later."""
        if not self.group_baseline:
            return [list(group) for group in rewards]
        return [advantage for group in rewards for advantage in against_batch([group])]
