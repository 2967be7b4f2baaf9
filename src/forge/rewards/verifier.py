"""The verifier protocol: score the responses to a prompt, in one or more columns."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Protocol

import numpy as np


class Unscored(Exception):
    """A response cannot be scored; the message is the reason that `Scores` holds."""


def reason_of(error: BaseException) -> str:
    """Return the reason that `Scores` gives for an exception."""
    return str(error) if isinstance(error, Unscored) else f"{type(error).__name__}: {error}"


@dataclass
class Scores:
    """values: [responses, names] float64 on the verifier's own scale, NaN where unscored; reasons[(i, j)] says why.

    `steps`, of a verifier that scores steps, has for each response where its steps end, in characters, and what each of
    them adds to the value. `extras` has additional numbers of each response, for metrics.
    """

    values: np.ndarray
    reasons: dict[tuple[int, int], str] = field(default_factory=dict)
    steps: list[list[tuple[int, float]]] | None = None
    extras: list[dict[str, float]] | None = None

    @classmethod
    def none(cls, responses: int, names: int, reason: str) -> Scores:
        """Return all unscored, for one reason."""
        reasons = {(i, j): reason for i in range(responses) for j in range(names)}
        return cls(np.full((responses, names), np.nan), reasons)

    @classmethod
    def from_outcomes(cls, outcomes: Sequence[float | Sequence[float] | BaseException | None], names: int) -> Scores:
        """Return scores from the outcome of each response: `names` numbers (or the number, of one name); None or an
        exception where it is unscored. Numbers that are not finite and strings are unscored too."""
        scores = cls(np.full((len(outcomes), names), np.nan))
        for i, outcome in enumerate(outcomes):
            try:
                if isinstance(outcome, BaseException):
                    raise outcome
                if outcome is None:
                    raise Unscored("it gave no score (None)")

                # Strings would be converted to numbers by numpy.
                if not all(isinstance(number, Real | np.bool_) for number in np.asarray(outcome).flat):
                    raise Unscored(f"it gave {outcome!r:.80}, which is not a number")
                if np.size(outcome) != names:
                    raise Unscored(f"it gave {np.size(outcome)} numbers for {names}")
                scores.values[i] = outcome
                reason = f"it gave {outcome}"
            except BaseException as error:
                reason = reason_of(error)

            for j in range(names):
                if not math.isfinite(scores.values[i, j]):
                    scores.values[i, j] = np.nan
                    scores.reasons[i, j] = reason

        return scores


class Verifier(Protocol):
    """Scores responses. Any object of this form is a verifier.

    Unscored responses are NaN with a reason. `score` may raise: a `Panel` turns the exception into the reason for all
    responses of the call. Calls may overlap.

    Optional attributes, used by a `Panel`:

    - `progress`: a number that grows with the work done; calls are then served first come first served. The panel's
      timeout restarts as long as it grows.
    - `async def close()`: frees resources.

    A verifier of a configuration (`use: package.module:Name`, the other keys are its constructor's arguments) opens
    nothing in its constructor, so that settings are checked before any process starts. It may also have

    - `def check()`: raises ValueError if a file or folder is missing; loads no models.
    - `def warning(targets)`: a line about the data set's targets to log before the run, or "".
    - `def setup()`: loads models; called once, in the process that scores.
    - `files`: paths of files whose content decides its scores; a resumed run checks them.
    - `def planned_models()`: the settings of the models that `setup` loads, as `RewardModelSettings`, for `forge plan`.
    - `learns = True` with `async def state_dict()` and `async def load_state_dict(state)`: its state is part of
      checkpoints.
    """

    names: tuple[str, ...]  # one column each

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """[responses, names] scores of the responses to one prompt; NaN with a reason where one cannot be scored."""


async def collect_scores(calls: Sequence[Awaitable[float | Sequence[float] | None]], names: int) -> Scores:
    """Await the score of each response; an exception leaves its response unscored and is the reason."""
    return Scores.from_outcomes(await asyncio.gather(*calls, return_exceptions=True), names)


async def close_all(verifiers: Sequence[Verifier]) -> None:
    """Close the verifiers that have `close`, all of them even if one raises."""
    closing = [verifier.close() for verifier in verifiers if hasattr(verifier, "close")]
    for outcome in await asyncio.gather(*closing, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
