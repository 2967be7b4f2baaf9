"""Advantages of episodes: the reward less a baseline.

Functions of the rewards of one prompt's samples, [samples], or of several prompts', [groups][samples].
"""

import math
from collections.abc import Sequence
from typing import Literal

Std = Literal["sample", "population"]

# A deviation below this share of the largest reward is rounding, of a sum in another order or of float32 (6e-8):
# divided by, it would be advantages near 1.
ROUNDING = 1e-7


def group_relative(
    rewards: Sequence[float], normalize: bool = True, epsilon: float = 1e-4, std: Std = "sample"
) -> list[float]:
    """Group-relative advantages of GRPO (Shao et al. 2024, DeepSeekMath, eq. 3): `(r_i - mean) / (std + epsilon)`.

    Args:
        rewards: the rewards of one prompt's samples, [samples].
        normalize: divide by the group's standard deviation; False gives Dr.GRPO's centred rewards (Liu et al. 2025),
            which do not over-weight groups that are nearly all right or all wrong.
        epsilon: added to the standard deviation. Rewards that differ by rounding only have advantages of 0.
        std: "sample" is the unbiased estimate (n - 1), "population" the deviation of the samples themselves (n).

    Raises:
        ValueError: fewer than two rewards, as a group of one has no baseline; or a reward that is not finite.

    >>> group_relative([1.0, 0.0], normalize=False)
    [0.5, -0.5]
    """
    # Rewards that differ by rounding only are equal.
    centred = _subtract_mean(rewards)
    if not normalize:
        return centred
    deviation = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - (0 if std == "population" else 1)))
    if deviation <= ROUNDING * max(map(abs, rewards)):
        return [0.0] * len(rewards)
    return [c / (deviation + epsilon) for c in centred]


def check_std(std: str, epsilon: float) -> None:
    """ValueError: not a standard deviation that `group_relative` has."""
    if std not in ("sample", "population") or not 0 <= epsilon < math.inf:
        raise ValueError(
            f"std must be sample or population and std_epsilon at least 0 and finite, got {std}, {epsilon}"
        )


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Return each reward against the mean of the others (Kool et al. 2019; Ahmadian et al. 2024, RLOO): an unbiased
    baseline.

    Equal to `(r_i - mean) * n / (n - 1)`. `rewards` are of one prompt's samples, [samples].

    Raises:
        ValueError: fewer than two rewards.

    >>> leave_one_out([1.0, 0.0, 0.0])
    [1.0, -0.5, -0.5]
    """
    return [c * len(rewards) / (len(rewards) - 1) for c in _subtract_mean(rewards)]


def against_batch(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return each reward against the mean of the whole batch, [groups][samples]; groups may have one sample."""
    mean = _exact_mean([reward for group in groups for reward in group])
    return [[reward - mean for reward in group] for group in groups]


def _subtract_mean(rewards: Sequence[float]) -> list[float]:
    if len(rewards) < 2:
        raise ValueError(f"group-relative advantages need at least 2 samples of a prompt, got {len(rewards)}")
    mean = _exact_mean(rewards)
    return [reward - mean for reward in rewards]


def _exact_mean(rewards: Sequence[float]) -> float:
    """Return the mean; of equal rewards without rounding, so that they have no advantage over one another."""
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"rewards must be finite, got {list(rewards)}: an unscored episode has the reward None")
    return min(max(math.fsum(rewards) / len(rewards), min(rewards)), max(rewards))
