"""Rewards: the sum of scorers, which are functions, objects with `score_group`, verifiers or panels."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ..observability import record_metric
from .verifier import Scores, Verifier, close_all

log = logging.getLogger(__name__)
REASONS = 10  # reasons that are logged of each verifier
# Raised by a reward, they would end the program as if nothing were wrong.
EXIT_ERRORS = (SystemExit, KeyboardInterrupt)
# Raised in a thread, no future carries them: the caller would wait for ever.
FUTURE_ERRORS = (StopIteration, asyncio.CancelledError, GeneratorExit)
REPORT_INTERVAL = 30.0  # seconds of a call, as of reading data, after which a line names what is waited for


class BadScore(ValueError):
    """A reward returned something other than a score."""


class FunctionVerifier:
    """A function as a verifier of one column: `f(prompt, response, target) -> float | None`, plain or async, or an
    object whose async `score_group(prompt, responses, target)` scores all responses of a prompt together.

    None or NaN marks a response unscored. Exceptions propagate: an error in a reward function must not be hidden. Plain
    functions run in a thread.

    Raises:
        ValueError: the function takes other arguments; or, of a call, a score is neither a finite number nor None, or
            the number of scores differs from the number of responses.
    """

    def __init__(self, function: Any) -> None:
        self.function, self._reported = function, -math.inf
        self.names: tuple[str, ...] = (getattr(function, "__name__", type(function).__name__),)
        call = getattr(function, "score_group", function)
        try:
            signature = inspect.signature(call)
        except (TypeError, ValueError):  # of a function in C
            return
        try:
            # The arguments are tried without a call, so that a wrong function is an error before the run.
            signature.bind("", "", "")
            takes_one = "completions" not in signature.parameters  # TRL's, of a batch: three would bind by position
        except TypeError:
            takes_one = False
        if not takes_one:
            text = f"the reward {self.names[0]}{signature} cannot be called with (prompt, response, target)"
            raise ValueError(text + _wrapper(self.names[0], signature)) from None

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """[responses, 1]."""
        with self._timed(prompt):
            returned = await self._scored(prompt, responses, target)
        return self._checked(returned, prompt, responses, target)

    async def _scored(self, prompt: str, responses: Sequence[str], target: str | None) -> Any:
        function = self.function

        def called(response: str) -> object:
            with self._named(prompt, target, response):
                try:
                    return function(prompt, response, target)
                except (*EXIT_ERRORS, *FUTURE_ERRORS) as error:
                    raise self._contained(error) from error

        async def awaited(response: str | None, call: Callable[..., Awaitable[object]], *args: object) -> object:
            with self._named(prompt, target, response):
                try:
                    return await call(*args)
                except EXIT_ERRORS as error:
                    raise self._contained(error) from error

        # All responses in one call, each in a coroutine, or one after the other in a thread.
        if hasattr(function, "score_group"):
            return await awaited(None, function.score_group, prompt, responses, target)
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return await asyncio.gather(*(awaited(text, function, prompt, text, target) for text in responses))
        return await asyncio.to_thread(lambda: [called(response) for response in responses])

    def _checked(self, returned: Any, prompt: str, responses: Sequence[str], target: str | None) -> Scores:
        name = self.names[0]
        # A wrong number or kind of scores is an error of the function, which must not be hidden as a missing score.
        if len(returned) != len(responses):
            raise BadScore(f"the reward {name} gave {len(returned)} scores for {len(responses)} responses")
        scores = Scores(np.full((len(responses), 1), np.nan))
        for i, score in enumerate(returned):
            try:
                if score is None or math.isnan(score):
                    scores.reasons[i, 0] = f"it gave {score}"
                    continue
                if math.isinf(score):
                    raise OverflowError
            except (TypeError, ValueError, OverflowError):  # ValueError: a tensor of several numbers
                remedy = "give a finite number, or None for no score"
                with self._named(prompt, target, responses[i]):
                    raise BadScore(f"the reward {name} gave {score!r:.80}: {remedy}") from None
            scores.values[i, 0] = score
        return scores

    def _contained(self, error: BaseException) -> RuntimeError:
        """The error raised in place of an exception that would end more than this call."""
        return RuntimeError(f"the reward {self.names[0]} raised {error!r}")

    @contextmanager
    def _timed(self, prompt: str) -> Iterator[None]:
        """Log a line each time that a call has taken REPORT_INTERVAL more; one line for all concurrent calls."""
        loop, begun = asyncio.get_running_loop(), time.monotonic()
        timers: list[asyncio.TimerHandle] = []

        def report() -> None:
            now = time.monotonic()
            timers[:] = [loop.call_later(REPORT_INTERVAL, report)]
            if now - self._reported >= REPORT_INTERVAL:
                self._reported = now
                log.warning(
                    "the reward %s has scored prompt %.100r for %.0f s so far", self.names[0], prompt, now - begun
                )

        # The timer renews itself until the call ends.
        timers.append(loop.call_later(REPORT_INTERVAL, report))
        try:
            yield
        finally:
            timers[0].cancel()

    @contextmanager
    def _named(self, prompt: str, target: str | None, response: str | None = None) -> Iterator[None]:
        """Add to an exception the prompt and response that were scored when it was raised."""
        try:
            yield
        except Exception as error:
            answer = "" if response is None else f", response {response!r:.300}"
            error.add_note(f"the reward {self.names[0]} scored prompt {prompt!r:.300}, target {target!r:.100}{answer}")
            raise


def _wrapper(name: str, signature: inspect.Signature) -> str:
    """The remedy in an error about a reward function of TRL's form; empty for another form."""
    if "completions" not in signature.parameters:
        return ""
    # Columns of TRL's data set are parameters; one of them can be the target.
    needed = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    columns = [parameter for parameter in needed if parameter not in ("prompts", "completions")]
    if len(columns) > 1:
        return f": it needs the columns {', '.join(columns)}, and a row has one target: read them from it in a wrapper"
    values = {"prompts": "prompt", "completions": "response", **dict.fromkeys(columns, "target")}
    # TRL's arguments are lists over a batch, here of one.
    arguments = ", ".join(f"{parameter}=[{values[parameter]}]" for parameter in needed)
    return f": wrap it, lambda prompt, response, target: {name}({arguments})[0]"


def as_verifier(scorer: Any) -> Verifier:
    """A `Verifier` from a verifier, a function, or an object with `score_group`.

    Raises:
        ValueError: it is none of these.
    """
    if hasattr(scorer, "score") and hasattr(scorer, "names"):
        return scorer
    if callable(scorer) or hasattr(scorer, "score_group"):
        return FunctionVerifier(scorer)
    raise ValueError(f"a reward is a function of (prompt, response, target) or a verifier, got {scorer!r:.80}")


class Score(NamedTuple):
    """`reward` is None if the response is unscored, `correct` if that is unknown. `parts` is what each of several
    scorers adds to the reward, by name; `steps` what its steps earn of it: (end in characters, reward)."""

    reward: float | None
    correct: bool | None
    parts: dict[str, float] | None = None
    steps: list[tuple[int, float]] | None = None


class Reward:
    """The sum of scorers. A response that one of them does not score has no reward.

    Args:
        scorers: functions, objects with `score_group`, or verifiers.
        accuracy: the function that decides whether a response is right (a score of at least 1); by default the first
            function among `scorers`.

    Raises:
        ValueError: no scorers, or two that learn.
    """

    def __init__(self, scorers: Sequence[Any], accuracy: Any = None) -> None:
        if not scorers:
            raise ValueError("a reward needs at least one function, or verifiers")
        self.verifiers = [as_verifier(scorer) for scorer in scorers]
        # The accuracy function is often among the scorers: it is then called once.
        functions = [verifier for verifier in self.verifiers if isinstance(verifier, FunctionVerifier)]
        matching = [verifier for verifier in functions if verifier.function is accuracy]
        self.accuracy: Verifier | None = (functions or [None])[0]  # type: ignore[list-item]
        if accuracy is not None:
            self.accuracy = matching[0] if matching else as_verifier(accuracy)
        learning = [verifier for verifier in self.verifiers if getattr(verifier, "learns", False)]
        if len(learning) > 1:
            raise ValueError("only one of a reward's functions may learn")
        self.learner: Any = learning[0] if learning else None
        self._logged: dict[str, set[str]] = {}

    def setup(self) -> None:
        """Set up the scorers that need it: models, sandboxes."""
        for verifier in self.verifiers:
            if hasattr(verifier, "setup"):
                verifier.setup()

    async def score(self, prompt: object, responses: Sequence[str], target: str | None) -> list[Score]:
        """The rewards of the responses of one prompt, in order. Records the share of missing scores of verifiers."""
        prompt = str(prompt)
        total = np.zeros(len(responses))
        # Sums over the scorers, with each one's part and the rewards of steps.
        correct: list[bool | None] = [None] * len(responses)
        parts: dict[str, np.ndarray] = {}
        steps: list[list[tuple[int, float]]] = [[] for _ in responses]
        for verifier in self.verifiers:
            scores = await verifier.score(prompt, responses, target)
            is_function = isinstance(verifier, FunctionVerifier)
            name = verifier.names[0] if is_function else type(verifier).__name__
            part = scores.values.sum(1)
            parts[name] = parts.get(name, 0.0) + part
            if not is_function:
                report_missing(verifier, scores, self._logged)
            total += part
            for response_steps, scored_steps in zip(steps, scores.steps or (), strict=False):
                response_steps += scored_steps
            if verifier is self.accuracy:
                correct = _correct(scores)
        # An accuracy function that is not among the scorers is asked separately.
        if self.accuracy is not None and self.accuracy not in self.verifiers:
            correct = await self.judge(prompt, responses, target)
        return [
            Score(
                None if np.isnan(reward) else float(reward),
                right,
                {name: float(values[i]) for name, values in parts.items()} if len(self.verifiers) > 1 else None,
                steps[i] or None,
            )
            for i, (reward, right) in enumerate(zip(total, correct, strict=True))
        ]

    async def judge(self, prompt: object, responses: Sequence[str], target: str | None) -> list[bool | None]:
        """Whether each response is right, by the accuracy function alone; None where that is unscored.

        Raises:
            ValueError: there is no such function.
        """
        if self.accuracy is None:
            raise ValueError("nothing says which responses are right: set reward.accuracy, or eval.problems to 0")
        return _correct(await self.accuracy.score(str(prompt), responses, target))

    async def close(self) -> None:
        """Close all scorers, even if one raises."""
        await close_all(self.verifiers)


def report_missing(verifier: Verifier, scores: Scores, logged: dict[str, set[str]]) -> None:
    """Record the share of missing scores by column, and log each column's first `REASONS` reasons once.

    Args:
        logged: the reasons that were logged already, by column; updated.
    """
    if not len(scores.values):
        return  # the share of no responses is undefined
    for name, missing in zip(verifier.names, np.isnan(scores.values).mean(0), strict=True):
        record_metric(f"missing/{name}", float(missing))
    for (_, column), reason in scores.reasons.items():
        reasons = logged.setdefault(name := verifier.names[column], set())
        if reason not in reasons and len(reasons) < REASONS:
            reasons.add(reason)
            log.warning("verifier %s did not score a response: %s", name, reason)


def _correct(scores: Scores) -> list[bool | None]:
    return [None if np.isnan(score) else bool(score >= 1.0) for score in scores.values[:, 0]]
