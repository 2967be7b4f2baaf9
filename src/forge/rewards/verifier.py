"""The verifier protocol: objects that score the responses to a prompt, in one or more columns."""

import asyncio
import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Protocol

import numpy as np


class Unscored(Exception):
    """Error: a response cannot be scored; the message is the reason in `Scores.reasons`."""


def reason_of(error: BaseException) -> str:
    """Return the text for `Scores.reasons` from the exception that left a response unscored.

    >>> reason_of(KeyError("answer"))
    "KeyError: 'answer'"
    """
    return str(error) if isinstance(error, Unscored) else f"{type(error).__name__}: {error}"


@dataclass
class Scores:
    """The scores that a verifier gives to the responses of a prompt.

    values: [responses, names] float64 on the verifier's own scale, NaN where unscored.
    reasons: {(response, name): why it is unscored}.
    steps: of each response [(end of a step in characters, what it adds to the value)]; None: steps are not scored.
    extras: of each response additional numbers for metrics.
    """

    values: np.ndarray
    reasons: dict[tuple[int, int], str] = field(default_factory=dict)
    steps: list[list[tuple[int, float]]] | None = None
    extras: list[dict[str, float]] | None = None

    @classmethod
    def none(cls, responses: int, names: int, reason: str) -> "Scores":
        """Return scores that are all missing for one reason, for the given numbers of responses and names."""
        reasons = {(response, name): reason for response in range(responses) for name in range(names)}
        return cls(np.full((responses, names), np.nan), reasons)

    @classmethod
    def from_outcomes(cls, outcomes: Sequence[float | Sequence[float] | BaseException | None], names: int) -> "Scores":
        """Return the scores of responses.

        Args:
            outcomes: for each response its numbers, one a name (or the number itself if there is one name). None or an
                exception leaves it unscored, and so does a value that is not a finite number.
            names: number of names.
        """
        scores = cls(np.full((len(outcomes), names), np.nan))
        for response, outcome in enumerate(outcomes):
            # Whatever is wrong with an outcome, also what numpy raises for it, is the reason of missing scores.
            try:
                if isinstance(outcome, BaseException):
                    raise outcome
                if outcome is None:
                    raise Unscored("the verifier returned no score (None)")

                # Checked here, as numpy would convert strings to numbers.
                if not all(isinstance(number, Real | np.bool_) for number in np.asarray(outcome).flat):
                    raise Unscored(f"the verifier returned {outcome!r:.80}, which is not a number")
                if np.size(outcome) != names:
                    raise Unscored(f"the verifier must return {names} numbers for a response, got {np.size(outcome)}")
                scores.values[response] = outcome
                reason = f"it gave {outcome}"
            except BaseException as error:
                reason = reason_of(error)

            for name in range(names):
                if not math.isfinite(scores.values[response, name]):
                    scores.values[response, name] = np.nan
                    scores.reasons[response, name] = reason

        return scores


class Verifier(Protocol):
    """Protocol of objects that score responses to a prompt.

    Unscored responses are NaN with a reason. `score` may raise: a `Panel` turns the exception into the reason for all
    responses of the call. Calls may overlap.

    Optional attributes, used by a `Panel`:

    - `progress`: a number that grows with the work done. The panel's timeout restarts whenever it has grown; calls are
      then served in the order in which they arrive.
    - `async def close()`: frees resources.

    A verifier that a configuration names (`use: package.module:Name`, the other keys are its constructor's arguments)
    opens nothing in its constructor, so that settings are checked before any process starts. It may also have

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
        """Return [responses, names] scores of the responses to one prompt; NaN with a reason where one is missing."""


async def collect_scores(calls: Sequence[Awaitable[float | Sequence[float] | None]], names: int) -> Scores:
    """Return the scores of responses from one awaitable for each; the exception of one is the reason why its response
    is unscored. `names` is the number of names."""
    return Scores.from_outcomes(await asyncio.gather(*calls, return_exceptions=True), names)


async def close_all(verifiers: Sequence[Verifier]) -> None:
    """Close the verifiers that have `close`. If some raise, the others are closed nevertheless, and then the first
    exception is raised."""
    closing = [verifier.close() for verifier in verifiers if hasattr(verifier, "close")]
    for outcome in await asyncio.gather(*closing, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
