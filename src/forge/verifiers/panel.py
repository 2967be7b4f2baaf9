"""Several verifiers as one."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .cache import Cache, Fingerprint, key_of
from .threads import within
from .verifier import Scores, Unscored, Verifier, close_all

log = logging.getLogger(__name__)


@dataclass
class Tally:
    """What became of the responses that a verifier was given.

    `scored` and `missing` count numbers, one for each response and column, those from the cache included; `reasons`
    says how often each reason came. `seconds` is the time of calls, waiting included; they may overlap.
    """

    scored: int = 0
    cached: int = 0
    missing: int = 0
    seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        text = f"{self.scored} scored ({self.cached} of them known before), {self.seconds:.1f} s"
        if not self.missing:
            return text
        common = "; ".join(f"{count} x {reason}" for reason, count in self.reasons.most_common(3))
        return f"{text}; {self.missing} missing: {common}{' ...' if len(self.reasons) > 3 else ''}"


class Panel:
    """Asks all its verifiers at once. What fails or takes too long is NaN with a reason; the others' scores stay.

    Args:
        verifiers: at least one; panels may hold panels.
        timeout: seconds that each verifier has for one call; what it has by then of the call's responses is lost, so
            that verifiers with limits of their own for each response should have shorter ones. For verifiers that tell
            their `progress`, as all of this library do, it counts work, not the waiting behind other calls: they may
            take longer for a call as long as in every so many seconds they get on with any.
        cache: scores of verifiers that tell their `fingerprint` are taken from it and kept in it; with one, responses
            that are equal are scored once. Calls wait for the fingerprint beside their time limit, and are done without
            the cache where it cannot be read.

    Raises:
        ValueError: no verifier, a name that comes twice, or a timeout that is not above 0.
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
        self.tallies = [Tally() for _ in self.verifiers]
        self._fingerprints = [Fingerprint(verifier) for verifier in self.verifiers]

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """[responses, names]; never raises for what a verifier does."""
        parts = await asyncio.gather(
            *(
                self._ask(*one, prompt, list(responses), target)
                for one in zip(self.verifiers, self.tallies, self._fingerprints, strict=True)
            )
        )
        reasons: dict[tuple[int, int], str] = {}
        start = 0
        for part in parts:
            reasons |= {(i, start + j): reason for (i, j), reason in part.reasons.items()}
            start += part.values.shape[1]
        return Scores(np.concatenate([part.values for part in parts], axis=1), reasons)

    def describe(self) -> str:
        """For people: a line for each verifier, with what became of the responses so far."""
        pairs = zip(self.verifiers, self.tallies, strict=True)
        return "\n".join(f"{', '.join(verifier.names)}: {tally}" for verifier, tally in pairs)

    @property
    def progress(self) -> float:
        """That of all its verifiers, and of reading their fingerprints: it limits each by itself."""
        reading = sum(fingerprint.seconds for fingerprint in self._fingerprints)
        return reading + sum(getattr(verifier, "progress", 0) for verifier in self.verifiers)

    async def close(self) -> None:
        """Close all verifiers that can be; each once, also if another's closing raises."""
        await close_all(self.verifiers)

    async def _ask(
        self,
        verifier: Verifier,
        tally: Tally,
        fingerprint: Fingerprint,
        prompt: str,
        responses: list[str],
        target: str | None,
    ) -> Scores:
        if not responses:
            return Scores(np.empty((0, len(verifier.names))))
        start = time.perf_counter()
        identity = None if self.cache is None else await fingerprint()
        try:
            asked = self._cached(verifier, tally, identity, prompt, responses, target)
            found = await within(self.timeout, asked, "the verifier", lambda: getattr(verifier, "progress", None))
        except Exception as error:
            reason = str(error) if isinstance(error, Unscored) else f"{type(error).__name__}: {error}"
            found = Scores.none(len(responses), len(verifier.names), reason)
        tally.seconds += time.perf_counter() - start
        missing = len(found.reasons)
        tally.missing += missing
        tally.scored += found.values.size - missing
        tally.reasons.update(found.reasons.values())
        return found

    async def _cached(
        self,
        verifier: Verifier,
        tally: Tally,
        fingerprint: str | None,
        prompt: str,
        responses: list[str],
        target: str | None,
    ) -> Scores:
        width = len(verifier.names)
        if self.cache is None or fingerprint is None:
            return _checked(await verifier.score(prompt, responses, target), len(responses), verifier)
        # A unit is what the cache holds as one entry: a response, or of a grouped verifier all of them together.
        grouped = getattr(verifier, "grouped", False)
        units = [tuple(responses)] if grouped else [(response,) for response in dict.fromkeys(responses)]
        places = [(units[0], i) for i in range(len(responses))] if grouped else [((one,), 0) for one in responses]
        keys = {unit: key_of(f"{fingerprint} {verifier.names}", prompt, unit, target) for unit in units}
        known: dict[str, tuple[float, ...]] = {}
        try:
            known = await self.cache.get(list(keys.values()))
        except sqlite3.Error as error:
            log.warning("the cache %s cannot be read, everything is scored again: %s", self.cache.path, error)
        parts = {unit: Scores(np.reshape(known[key], (-1, width))) for unit, key in keys.items() if key in known}
        tally.cached += width * sum(unit in parts for unit, _ in places)
        new = [unit for unit in units if unit not in parts]
        if new:
            asked = [response for unit in new for response in unit]
            fresh, start = _checked(await verifier.score(prompt, asked, target), len(asked), verifier), 0
            for unit in new:
                inside = range(start, start + len(unit))
                reasons = {(i - start, j): reason for (i, j), reason in fresh.reasons.items() if i in inside}
                parts[unit] = Scores(fresh.values[start : start + len(unit)], reasons)
                start += len(unit)
            complete = [unit for unit in new if not parts[unit].reasons]
            try:
                await self.cache.put({keys[unit]: tuple(parts[unit].values.ravel().tolist()) for unit in complete})
            except sqlite3.Error as error:
                log.warning("the cache %s cannot be written, it keeps no scores: %s", self.cache.path, error)
        values = np.stack([parts[unit].values[place] for unit, place in places])
        columns = [(i, j, *where) for i, where in enumerate(places) for j in range(width)]
        reasons = {(i, j): why for i, j, unit, k in columns if (why := parts[unit].reasons.get((k, j))) is not None}
        return Scores(values, reasons)


def _checked(found: Scores, responses: int, verifier: Verifier) -> Scores:
    """The same with a reason for every number that is not finite. ValueError: another number of scores than asked."""
    if not isinstance(found, Scores):
        raise TypeError(f"its score must return forge.verifiers.Scores, not {type(found).__name__}")
    values = np.asarray(found.values, dtype=np.float64)
    if values.shape != (responses, len(verifier.names)):
        raise ValueError(f"it gave scores of shape {values.shape} for {responses} responses and {verifier.names}")
    lacking = {(int(i), int(j)) for i, j in np.argwhere(~np.isfinite(values))}
    reasons = {where: found.reasons.get(where, "it gave no reason") for where in sorted(lacking)}
    return Scores(np.where(np.isfinite(values), values, np.nan), reasons)
