"""DAPO: clip higher, weigh every token alike, train only on prompts with signal."""

from dataclasses import KW_ONLY, dataclass

from .clipped import Clipped, GroupRelative


@dataclass(eq=False)
class DAPO(Clipped, GroupRelative):
    """Decoupled clip and dynamic sampling (Yu et al. 2025, eq. 8), with the dual clip of its reference code.

        A_i = (r_i - mean(r)) / (std(r) + std_epsilon)  over the rewards r of a prompt's samples
        per token:  -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), at most -dual_clip * A where A < 0

    Three of its four parts are not in the loss: prompts whose samples are all right or all wrong are replaced
    (`dynamic_sampling`, section 3.2), every token counts the same (aggregation "token_mean", section 3.3), and answers
    close to the length limit lose reward (`grpo.overlong_buffer`, section 3.4).

    Args:
        clip_low, clip_high, dual_clip, normalize, std, std_epsilon: as in `GRPO`.
        dynamic_sampling: maximum number of prompts that are replaced for each prompt of a batch; 0: off.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    _: KW_ONLY
    dual_clip: float | None = 10.0
    dynamic_sampling: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dynamic_sampling < 0:
            raise ValueError(f"dynamic_sampling must be at least 0, got {self.dynamic_sampling}")
