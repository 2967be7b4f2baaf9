"""A panel: several verifiers that are used as one."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import numpy as np

from forge.rewards.verifier import Scores, Verifier, close_all, reason_of

from .threads import await_within


class Panel:
    """Panel of several verifiers that run concurrently, with one score column or more for each.

    If a verifier fails or times out, its scores are NaN with a reason.

    Args:
        verifiers: at least one; a panel is a verifier, too.
        timeout: seconds that each verifier may take for one call. On timeout all scores of the call are lost, so time
            limits for single responses should be shorter. For verifiers with `progress`, as this library's, the timeout
            restarts whenever any of their calls progresses, so that waiting for other calls does not count.

    Attributes:
        missing: the number of unscored responses by verifier and reason.

    Raises:
        ValueError: two verifiers have a column of the same name.
    """

    def __init__(self, verifiers: Sequence[Verifier], *, timeout: float = 60.0) -> None:
        self.verifiers, self.timeout = tuple(verifiers), timeout
        self.names = tuple(name for verifier in self.verifiers for name in verifier.names)
        if repeated := sorted(name for name, count in Counter(self.names).items() if count > 1):
            raise ValueError(f"two verifiers of a panel are called {', '.join(repeated)}: give one another name")
        self.missing: Counter[str] = Counter()

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """Return scores [responses, names] of the responses to one prompt; NaN with a reason where one is unscored."""
        calls = (self._ask_verifier(verifier, prompt, list(responses), target) for verifier in self.verifiers)
        all_scores = await asyncio.gather(*calls)
        reasons: dict[tuple[int, int], str] = {}
        first_column = 0  # of the verifier, in the panel's scores
        for scores in all_scores:
            reasons |= {(row, first_column + column): reason for (row, column), reason in scores.reasons.items()}
            first_column += scores.values.shape[1]
        return Scores(np.concatenate([scores.values for scores in all_scores], axis=1), reasons)

    @property
    def progress(self) -> float:
        """Return the sum of the verifiers' progress, for a panel within a panel."""
        return sum(getattr(verifier, "progress", 0) for verifier in self.verifiers)

    async def close(self) -> None:
        """Close all verifiers, even if one raises."""
        await close_all(self.verifiers)

    async def _ask_verifier(self, verifier: Verifier, prompt: str, responses: list[str], target: str | None) -> Scores:
        # Return the scores of one verifier, in which each NaN has a reason.
        shape = (len(responses), len(verifier.names))
        try:
            scores = await await_within(
                self.timeout,
                verifier.score(prompt, responses, target),
                "the verifier",
                lambda: getattr(verifier, "progress", None),
            )
            if np.shape(scores.values) != shape:
                raise ValueError(
                    f"the verifier returned scores of shape {np.shape(scores.values)} for {shape[0]} responses"
                )
        except Exception as error:
            scores = Scores.none(*shape, reason_of(error))
        # A plugin's verifier may return infinity, or NaN without a reason.
        values = np.where(np.isfinite(scores.values), scores.values, np.nan)
        unscored = [(int(row), int(column)) for row, column in np.argwhere(np.isnan(values))]
        reasons = {cell: scores.reasons.get(cell, "it gave no reason") for cell in unscored}
        self.missing.update(f"{verifier.names[0]}: {reason}" for reason in reasons.values())
        return Scores(values, reasons)
