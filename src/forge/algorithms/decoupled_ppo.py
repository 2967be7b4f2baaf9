"""Decoupled PPO: the policy that the step starts from, apart from the one that sampled."""

from dataclasses import KW_ONLY, dataclass

from .clipped import Clipped, GroupRelative
from .correction import Correction

# The cap of AReaL (Fu et al. 2025): tokens with a larger weight do not train.
CAPPED = Correction("mask", low=0.0, high=5.0)


@dataclass(eq=False)
class DecoupledPPO(Clipped, GroupRelative):
    """The decoupled objective (Hilton et al. 2022, "Batch size-invariance for policy optimization", eq. 6).

        A_i = (r_i - mean(r)) / (std(r) + std_epsilon)  over the rewards r of a prompt's samples
        per token:  -(pi_prox / pi_behaviour) * min(ratio * A, clip(ratio) * A),   ratio = pi / pi_prox

    The clip holds the policy near the proximal one, which the step starts from; the weight in front corrects for the
    policy that sampled, however old that is. In a step of one update the ratio is 1 and only the weight remains: this
    algorithm is for steps of several updates (`training.mini_batches`, `training.epochs`).

    Args:
        clip_low, clip_high, dual_clip, normalize, std, std_epsilon: as in `GRPO`.
        correction: the weight in front and its bounds; `Correction("truncate", high=inf)` is the paper's.
    """

    _: KW_ONLY
    correction: Correction | None = CAPPED

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.correction is None:
            raise ValueError(
                "decoupled PPO needs a correction, got null: omit grpo.correction, or choose another algorithm"
            )
