"""Answers that come near the length limit lose reward."""

from __future__ import annotations

from collections.abc import Sequence

from forge.types import Group


def overlong_penalty(groups: Sequence[Group], limit: int, buffer: int) -> None:
    """Subtract a length penalty from the rewards of scored episodes, in place (Yu et al. 2025, DAPO, eq. 13).

    0 up to `limit - buffer` tokens, from there linearly down to -1 at `limit`. An answer that was cut off at the limit
    thus differs from a wrong one by degrees, and not by a sudden -1 or 0.

    Args:
        limit: the most tokens that an answer may have.
        buffer: how long before the limit the penalty begins; 0 is no penalty.
    """
    for episode in (episode for group in groups for episode in group.episodes):
        if buffer and episode.reward is not None:
            episode.reward -= min(1.0, max(0.0, (sum(episode.mask) - (limit - buffer)) / buffer))
