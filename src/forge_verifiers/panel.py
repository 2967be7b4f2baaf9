"""A panel: several verifiers as one, each with a timeout."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import numpy as np

from forge.rewards.verifier import Scores, Verifier, close_all, reason_of

from .threads import await_within


class Panel:
    """Runs all its verifiers concurrently. The scores of one that fails or times out are NaN with a reason.

    Args:
        verifiers: at least one; panels may hold panels.
        timeout: seconds of each verifier for one call. On timeout the whole call is lost, so time limits for single
            responses should be shorter. For verifiers with `progress`, as all of this library, the timeout restarts
            whenever they progress with any call: waiting behind other calls does not count.

    Attributes:
        missing: number of unscored responses, by verifier and reason.

    Raises:
        ValueError: a repeated name.
    """

    def __init__(self, verifiers: Sequence[Verifier], *, timeout: float = 60.0) -> None:
        self.verifiers, self.timeout = tuple(verifiers), timeout
        self.names = tuple(name for verifier in self.verifiers for name in verifier.names)
        if repeated := sorted(name for name, count in Counter(self.names).items() if count > 1):
            raise ValueError(f"two verifiers of a panel are called {', '.join(repeated)}: give one another name")
        self.missing: Counter[str] = Counter()

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """[responses, names]; exceptions of verifiers become reasons."""
        # All verifiers at once; their columns side by side.
        calls = (self._ask_verifier(verifier, prompt, list(responses), target) for verifier in self.verifiers)
        parts = await asyncio.gather(*calls)
        reasons: dict[tuple[int, int], str] = {}
        start = 0
        for part in parts:
            reasons |= {(i, start + j): reason for (i, j), reason in part.reasons.items()}
            start += part.values.shape[1]
        return Scores(np.concatenate([part.values for part in parts], axis=1), reasons)

    @property
    def progress(self) -> float:
        """Return the sum over all verifiers."""
        return sum(getattr(verifier, "progress", 0) for verifier in self.verifiers)

    async def close(self) -> None:
        """Close all verifiers, even if one raises."""
        await close_all(self.verifiers)

    async def _ask_verifier(self, verifier: Verifier, prompt: str, responses: list[str], target: str | None) -> Scores:
        shape = (len(responses), len(verifier.names))
        try:
            call = verifier.score(prompt, responses, target)
            scores = await await_within(self.timeout, call, "the verifier", lambda: getattr(verifier, "progress", None))
            if np.shape(scores.values) != shape:
                raise ValueError(f"it gave scores of shape {np.shape(scores.values)} for {shape[0]} responses")
        except Exception as error:
            scores = Scores.none(*shape, reason_of(error))
        # A verifier of a plugin may leave the reason out; NaN always has one.
        values = np.where(np.isfinite(scores.values), scores.values, np.nan)
        unscored = [(int(i), int(j)) for i, j in np.argwhere(np.isnan(values))]
        reasons = {cell: scores.reasons.get(cell, "it gave no reason") for cell in unscored}
        self.missing.update(f"{verifier.names[0]}: {reason}" for reason in reasons.values())
        return Scores(values, reasons)
