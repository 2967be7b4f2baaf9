"""Advantages: how much better an episode did than what was to be expected of it."""

from __future__ import annotations

import math
from collections.abc import Sequence


def group_relative(rewards: Sequence[float], *, normalize: bool = True, epsilon: float = 1e-4) -> list[float]:
    """Group-relative advantages of GRPO (Shao et al. 2024, DeepSeekMath, eq. 3): `(r_i - mean) / (std + epsilon)`.

    Args:
        rewards: the rewards of one prompt's samples, [samples].
        normalize: divide by the group's sample standard deviation (n - 1); False gives Dr.GRPO's centred rewards
            (Liu et al. 2025), which do not over-weight groups that are nearly all right or all wrong.
        epsilon: added to the standard deviation.

    Raises:
        ValueError: fewer than two rewards; a group of one has no baseline.
    """
    if len(rewards) < 2:
        raise ValueError(f"group-relative advantages need at least 2 samples of a prompt, got {len(rewards)}")
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + epsilon) for c in centred]
