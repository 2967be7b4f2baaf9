"""Verifiers as a reward, on their own scale."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from ..observability import record_metric
from .verifier import Scores, Verifier

log = logging.getLogger(__name__)
REASONS = 10


class Watched:
    """A verifier whose missing scores are seen: the share by verifier is a metric, and each verifier's first `REASONS`
    reasons are logged, each once."""

    def __init__(self, panel: Verifier) -> None:
        self.panel, self._told = panel, dict[str, set[str]]()

    async def score(self, prompt: str, responses: Sequence[str], target: str | None) -> Scores:
        """[responses, names], see `Panel`."""
        scores = await self.panel.score(prompt, responses, target)
        if not responses:
            return scores  # none of nothing is no share
        for name, missing in zip(self.panel.names, np.isnan(scores.values).mean(0), strict=True):
            record_metric(f"missing/{name}", float(missing))
        for (_, column), reason in scores.reasons.items():
            name = self.panel.names[column]
            told = self._told.setdefault(name, set())
            if reason not in told and len(told) < REASONS:
                told.add(reason)
                log.warning("verifier %s did not score a response: %s", name, reason)
        return scores

    async def close(self) -> None:
        if hasattr(self.panel, "close"):
            await self.panel.close()


class PanelReward:
    """A verifier, such as a `Panel`, as a reward: the sum of its columns. A response that lacks one is unscored (None).

    Args:
        name: in metrics.
    """

    def __init__(self, panel: Verifier, name: str = "PanelReward") -> None:
        self.panel, self.__name__ = Watched(panel), name

    async def score_group(self, prompt: str, responses: Sequence[str], target: str | None = None) -> list[float | None]:
        """The rewards of the responses of one prompt, in order."""
        sums = (await self.panel.score(prompt, responses, target)).values.sum(1)
        return [None if np.isnan(total) else float(total) for total in sums]

    async def close(self) -> None:
        """Close the verifiers."""
        await self.panel.close()
