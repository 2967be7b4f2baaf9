"""Advantages of episodes: the reward less a baseline.

Functions of the rewards of one prompt's samples, [samples], or of several prompts', [groups][samples].
"""

import math
from collections.abc import Sequence
from typing import Literal

Std = Literal["sample", "population"]

# A deviation below this share of the largest reward comes from rounding, of a sum in another order or of float32
# (6e-8). A division by it would turn it into advantages near 1.
ROUNDING = 1e-7


def group_relative(
    rewards: Sequence[float], normalize: bool = True, epsilon: float = 1e-4, std: Std = "sample"
) -> list[float]:
    """Return the advantages of GRPO, `(r_i - mean) / (std + epsilon)` (Shao et al. 2024, DeepSeekMath, eq. 3).

    Args:
        rewards: the rewards of one prompt's samples, [samples].
        normalize: divide by the group's standard deviation; False gives Dr.GRPO's centred rewards (Liu et al. 2025),
            which do not over-weight groups that are nearly all right or all wrong.
        epsilon: added to the standard deviation. The advantages are 0 if rewards differ by rounding only.
        std: "sample" is the unbiased estimate (n - 1), "population" the deviation of the samples themselves (n).

    Raises:
        ValueError: fewer than two rewards, as a group of one has no baseline; or a reward that is not finite.

    >>> group_relative([1.0, 0.0], normalize=False)
    [0.5, -0.5]
    """
    centred = _subtract_mean(rewards)
    if not normalize:
        return centred
    divisor = len(rewards) - (0 if std == "population" else 1)
    deviation = math.sqrt(math.fsum(c * c for c in centred) / divisor)
    if deviation <= ROUNDING * max(map(abs, rewards)):
        return [0.0] * len(rewards)
    return [c / (deviation + epsilon) for c in centred]


def check_std(std: str, epsilon: float) -> None:
    """Raise ValueError for values of `std` and `epsilon` that `group_relative` does not support."""
    if std not in ("sample", "population") or not 0 <= epsilon < math.inf:
        raise ValueError(
            f"std must be sample or population and std_epsilon at least 0 and finite, got {std}, {epsilon}"
        )


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Return each reward less the mean of the others, an unbiased baseline (Kool et al. 2019; Ahmadian et al. 2024,
    RLOO).

    This equals `(r_i - mean) * n / (n - 1)`. `rewards` are one prompt's, [samples].

    Raises:
        ValueError: fewer than two rewards.

    >>> leave_one_out([1.0, 0.0, 0.0])
    [1.0, -0.5, -0.5]
    """
    return [centred * len(rewards) / (len(rewards) - 1) for centred in _subtract_mean(rewards)]


def against_batch(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return each reward less the mean of the whole batch, [groups][samples]; groups may have one sample.

    >>> against_batch([[1.0], [0.0]])
    [[0.5], [-0.5]]
    """
    rewards = [reward for group in groups for reward in group]
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"rewards must be finite, got {rewards}: an unscored episode has the reward None")

    # The mean of equal rewards is not rounded, so that their advantages are exactly 0.
    mean = min(max(math.fsum(rewards) / len(rewards), min(rewards)), max(rewards))
    return [[reward - mean for reward in group] for group in groups]


def _subtract_mean(rewards: Sequence[float]) -> list[float]:
    if len(rewards) < 2:
        raise ValueError(f"group-relative advantages need at least 2 samples of a prompt, got {len(rewards)}")
    return against_batch([rewards])[0]
