"""What a verifier is: it reads a prompt with its responses, and says one or more numbers of each response."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Protocol

import numpy as np


class Unscored(Exception):
    """A response cannot be scored; the message is the reason that `Scores` gives for it."""


@dataclass
class Scores:
    """values: [responses, names] float64 on the verifier's own scale, NaN where there is no score; reasons[(i, j)] says
    why."""

    values: np.ndarray
    reasons: dict[tuple[int, int], str] = field(default_factory=dict)

    @classmethod
    def none(cls, responses: int, names: int, reason: str) -> Scores:
        """No score at all, for one reason."""
        reasons = {(i, j): reason for i in range(responses) for j in range(names)}
        return cls(np.full((responses, names), np.nan), reasons)

    @classmethod
    def of(cls, outcomes: Sequence[float | Sequence[float] | BaseException | None], names: int) -> Scores:
        """From what became of each response: a number for each name (the number itself for one name), or None or an
        exception where there is none. A number that is not finite is no score, and a text of digits is none."""
        found = cls(np.full((len(outcomes), names), np.nan))
        for i, outcome in enumerate(outcomes):
            try:
                if isinstance(outcome, BaseException):
                    raise outcome
                if outcome is None:
                    raise Unscored("it gave no score (None)")
                if not all(isinstance(number, Real | np.bool_) for number in np.asarray(outcome).flat):
                    raise Unscored(f"it gave {outcome!r:.80}, which is no number")
                if np.size(outcome) != names:
                    raise Unscored(f"it gave {np.size(outcome)} numbers for {names}")
                found.values[i] = outcome
                reason = f"it gave {outcome}"
            except BaseException as error:
                reason = str(error) if isinstance(error, Unscored) else f"{type(error).__name__}: {error}"
            for j in range(names):
                if not math.isfinite(found.values[i, j]):
                    found.values[i, j] = np.nan
                    found.reasons[i, j] = reason
        return found


class Verifier(Protocol):
    """Scores responses; any object of this form is one.

    What cannot be scored is NaN with a reason. `score` may raise: a `Panel` makes that the reason for all responses of
    the call. It may be called again while it works.

    A verifier may say more of itself, which a `Panel` uses where it is there:

    - `fingerprint`: a text that changes when the scores could. Without one, or with None, nothing is cached.
    - `grouped = True`: the score of a response depends on the others.
    - `progress`: a number that grows as it works. It promises that what is asked first is served first, so that a call
      ends if work continues; a panel's time limit restarts as long as it grows.
    - `async def close()`: frees what it holds.

    A verifier that a configuration names (`use: package.module:Name`, the other keys are its constructor's arguments)
    opens nothing in its constructor, so that settings are checked before any process starts. It may also have

    - `def check()`: raises ValueError if what it names is missing; loads no models.
    - `def setup()`: loads models; called once, in the process that scores.
    - `files`: paths of files whose content decides its scores; a resumed run checks them.
    - `learns = True` with `async def state_dict()` and `async def load_state_dict(state)`: its state is part of
      checkpoints.
    """

    names: tuple[str, ...]  # one column each

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores: ...


async def collect(each: Sequence[Awaitable[float | Sequence[float] | None]], names: int) -> Scores:
    """Wait for the score of each response; one that raises has no score, and its exception is the reason."""
    return Scores.of(await asyncio.gather(*each, return_exceptions=True), names)


async def close_all(verifiers: Sequence[Verifier]) -> None:
    """Close those that have `close`; each once, also if another's closing raises."""
    closing = [verifier.close() for verifier in verifiers if hasattr(verifier, "close")]
    for outcome in await asyncio.gather(*closing, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
