"""Answers that come near the limit of length lose reward."""

from __future__ import annotations

from collections.abc import Sequence

from forge.types import Episode


def overlong_penalty(episodes: Sequence[Episode], limit: int, buffer: int) -> None:
    """Take the penalty of length off the rewards of scored episodes, in place (Yu et al. 2025, DAPO, eq. 13).

    0 up to `limit - buffer` tokens, from there linearly down to -1 at `limit`. An answer that was cut off at the limit
    is thus told apart from a wrong one by degrees, and not by a sudden -1 or 0.

    Args:
        limit: the most tokens that an answer may have.
        buffer: how long before the limit the penalty begins; 0 is no penalty.
    """
    for episode in episodes:
        if buffer and episode.reward is not None:
            episode.reward -= min(1.0, max(0.0, (sum(episode.mask) - (limit - buffer)) / buffer))
