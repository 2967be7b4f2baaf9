"""A panel: several verifiers as one, with a timeout and a cache."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import Counter
from collections.abc import Sequence

import numpy as np

from forge.rewards.verifier import Scores, Verifier, close_all, reason_of
from forge_verifiers.threads import within

from .cache import Cache, key_of

log = logging.getLogger(f"forge.{__name__}")


class Panel:
    """Runs all its verifiers concurrently. The scores of one that fails or times out are NaN with a reason.

    Args:
        verifiers: at least one; panels may hold panels.
        timeout: seconds of each verifier for one call. On timeout the whole call is lost, so time limits for single
            responses should be shorter. For verifiers with `progress`, as all of this library, the timeout restarts
            whenever they progress with any call: waiting behind other calls does not count.
        cache: of the scores of verifiers with a `fingerprint`; equal responses are then scored once. Reading the
            fingerprint does not count for the timeout; if that fails, scores are not cached.

    Raises:
        ValueError: no verifiers, a repeated name, or a timeout that is not above 0.
    """

    grouped = True

    def __init__(self, verifiers: Sequence[Verifier], *, timeout: float = 60.0, cache: Cache | None = None) -> None:
        self.verifiers, self.timeout, self.cache = tuple(verifiers), timeout, cache
        self.names = tuple(name for verifier in self.verifiers for name in verifier.names)
        if not self.names:
            raise ValueError("a panel needs at least one verifier")
        if repeated := sorted(name for name, count in Counter(self.names).items() if count > 1):
            raise ValueError(f"two verifiers of a panel are called {', '.join(repeated)}: give one another name")
        if timeout <= 0:
            raise ValueError(f"timeout must be above 0 seconds, got {timeout}")
        self.missing: Counter[str] = Counter()  # unscored responses, by verifier and reason
        self._fingerprints: dict[int, asyncio.Task[str | None]] = {}

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """[responses, names]; exceptions of verifiers become reasons."""
        # All verifiers at once; their columns side by side.
        calls = (self._ask(number, prompt, list(responses), target) for number in range(len(self.verifiers)))
        parts = await asyncio.gather(*calls)
        reasons: dict[tuple[int, int], str] = {}
        start = 0
        for part in parts:
            reasons |= {(i, start + j): reason for (i, j), reason in part.reasons.items()}
            start += part.values.shape[1]
        return Scores(np.concatenate([part.values for part in parts], axis=1), reasons)

    @property
    def progress(self) -> float:
        """The sum over all verifiers."""
        return sum(getattr(verifier, "progress", 0) for verifier in self.verifiers)

    async def close(self) -> None:
        """Close all verifiers, even if one raises."""
        await close_all(self.verifiers)

    async def _ask(self, number: int, prompt: str, responses: list[str], target: str | None) -> Scores:
        verifier = self.verifiers[number]
        if not responses:
            return Scores(np.empty((0, len(verifier.names))))
        # Reading a fingerprint may take minutes, and does not count for the timeout.
        fingerprint = None if self.cache is None else await self._fingerprint(number)
        try:
            if self.cache is None or fingerprint is None:
                call = _checked_scores(verifier, prompt, responses, target)
            else:
                call = self._cached(verifier, self.cache, fingerprint, prompt, responses, target)
            scores = await within(self.timeout, call, "the verifier", lambda: getattr(verifier, "progress", None))
        except Exception as error:
            scores = Scores.none(len(responses), len(verifier.names), reason_of(error))
        self.missing.update(f"{verifier.names[0]}: {reason}" for reason in scores.reasons.values())
        return scores

    async def _fingerprint(self, number: int) -> str | None:
        """The fingerprint, read once in a thread; None: there is none, or it cannot be read."""
        verifier = self.verifiers[number]

        async def read() -> str | None:
            try:
                return await asyncio.to_thread(getattr, verifier, "fingerprint", None)
            except Exception as error:
                log.warning("scores of %s are not cached: %s", verifier.names[0], reason_of(error))
                return None

        # Calls share one reading, which outlives each of them.
        if number not in self._fingerprints:
            self._fingerprints[number] = asyncio.create_task(read())
        return await asyncio.shield(self._fingerprints[number])

    async def _cached(
        self,
        verifier: Verifier,
        cache: Cache,
        fingerprint: str,
        prompt: str,
        responses: list[str],
        target: str | None,
    ) -> Scores:
        # A unit is one entry of the cache: a response, or all responses together of a grouped verifier.
        grouped = getattr(verifier, "grouped", False)
        units = [tuple(responses)] if grouped else [(response,) for response in responses]
        keys = {unit: key_of(f"{fingerprint} {verifier.names}", prompt, unit, target) for unit in units}
        cached: dict[str, tuple[float, ...]] = {}
        try:
            cached = await cache.get(list(keys.values()))
        except sqlite3.Error as error:
            log.warning("the cache %s cannot be read, everything is scored again: %s", cache.path, error)
        shape = (-1, len(verifier.names))
        parts = {unit: Scores(np.reshape(cached[key], shape)) for unit, key in keys.items() if key in cached}
        if uncached := [unit for unit in keys if unit not in parts]:
            fresh = await _checked_scores(verifier, prompt, [text for unit in uncached for text in unit], target)
            start = 0
            for unit in uncached:
                stop = start + len(unit)
                reasons = {(i - start, j): text for (i, j), text in fresh.reasons.items() if start <= i < stop}
                parts[unit] = Scores(fresh.values[start:stop], reasons)
                start = stop
            # A missing score may exist the next time: it is not cached.
            complete = {keys[unit]: parts[unit] for unit in uncached if not parts[unit].reasons}
            try:
                await cache.put({key: tuple(part.values.ravel().tolist()) for key, part in complete.items()})
            except sqlite3.Error as error:
                log.warning("the cache %s cannot be written, it keeps no scores: %s", cache.path, error)
        result = Scores(np.concatenate([parts[unit].values for unit in units]))
        for row, unit in enumerate(units):  # of several units each is one row
            result.reasons |= {(row + i, j): reason for (i, j), reason in parts[unit].reasons.items()}
        return result


async def _checked_scores(verifier: Verifier, prompt: str, responses: list[str], target: str | None) -> Scores:
    """The verifier's scores with a reason for every number that is not finite. ValueError: a wrong number of scores."""
    scores = await verifier.score(prompt, responses, target)
    if not isinstance(scores, Scores):
        raise TypeError(f"its score must return forge.rewards.Scores, not {type(scores).__name__}")
    # A verifier of a plugin may return anything; NaN always has a reason.
    values = np.asarray(scores.values, dtype=np.float64)
    if values.shape != (len(responses), len(verifier.names)):
        raise ValueError(f"it gave scores of shape {values.shape} for {len(responses)} responses and {verifier.names}")
    lacking = {(int(i), int(j)) for i, j in np.argwhere(~np.isfinite(values))}
    reasons = {cell: scores.reasons.get(cell, "it gave no reason") for cell in sorted(lacking)}
    return Scores(np.where(np.isfinite(values), values, np.nan), reasons)
