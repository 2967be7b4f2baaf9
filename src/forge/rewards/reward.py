"""Rewards: the weighted sum of scorers, which are functions, objects with `score_group`, verifiers or panels."""

import asyncio
import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..observability import record_metric
from ..types import Completion
from .arguments import Answers, RewardCall, adapt_function
from .verifier import Scores, Verifier, close_all

log = logging.getLogger(__name__)
REASONS = 10  # number of different reasons for missing scores that are logged of each verifier
# If a reward raised one of these, the program would end as if nothing were wrong.
EXIT_ERRORS = (SystemExit, KeyboardInterrupt)
# A future cannot carry these out of a thread, so that the caller would wait forever.
FUTURE_ERRORS = (StopIteration, asyncio.CancelledError, GeneratorExit)
REPORT_INTERVAL = 30.0  # seconds of a call after which a line says that it is still running


class BadScore(ValueError):
    """Error: a reward returned a value that is not a score."""


class FunctionVerifier:
    """A reward function as a verifier of one column.

    A score of None or NaN leaves the response unscored; for a function in TRL's form it means that the function does
    not apply to the response. Exceptions propagate, since an error in a reward function must not be hidden. Plain
    functions run in a thread.

    Args:
        function: `f(response, target, ...) -> float | None`, plain or async, called with the arguments that its
            parameters name (`forge.rewards.arguments`); or an object whose async `score_group(prompt, responses,
            target)` scores all responses to a prompt together.
        name: of the column; None: the function's.

    Raises:
        ValueError: the function has other parameters. When it is called: a score is neither a finite number nor None,
            or the number of scores differs from the number of responses.
    """

    def __init__(self, function: Any, name: str | None = None) -> None:
        self.function = function
        self.names: tuple[str, ...] = (name or str(getattr(function, "__name__", type(function).__name__)),)
        is_group = hasattr(function, "score_group")
        called = function.score_group if is_group else adapt_function(function)
        self.call = RewardCall(called, self.names[0], is_group)
        self.may_abstain = getattr(called, "may_abstain", False)  # None leaves the decision to other functions
        self._is_async = any(map(inspect.iscoroutinefunction, (called, type(called).__call__))) or is_group
        self._reported = -math.inf

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """Return [responses, 1] scores of the responses to one prompt."""
        return await self.score_answers(Answers.from_texts(prompt, responses, target))

    async def score_answers(self, answers: Answers) -> Scores:
        """Return [responses, 1] scores of answers, from which the function takes what its parameters name."""
        # The number of each response that the function is called for; None stands for all responses at once.
        indices = [None] if self.call.is_group else range(len(answers.responses))
        loop = asyncio.get_running_loop()
        started = loop.time()
        timer = loop.call_later(REPORT_INTERVAL, lambda: report())

        def report() -> None:
            # Every REPORT_INTERVAL of a call; of concurrent calls only one.
            nonlocal timer
            timer = loop.call_later(REPORT_INTERVAL, report)
            if loop.time() - self._reported >= REPORT_INTERVAL:
                self._reported = loop.time()
                elapsed = loop.time() - started
                log.warning("the reward %s still scores %.100r after %.0f s", self.names[0], answers.prompt, elapsed)

        try:
            # Async functions run concurrently, plain ones one after the other in a thread.
            if self._is_async:
                returned: Any = await asyncio.gather(*(self._await_function(answers, index) for index in indices))
            else:
                returned = await asyncio.to_thread(lambda: [self._call_function(answers, index) for index in indices])
        finally:
            timer.cancel()
        return self._read_scores(returned[0] if self.call.is_group else returned, answers)

    def _call_function(self, answers: Answers, number: int | None) -> object:
        try:
            return self.call(answers, number)
        except (*EXIT_ERRORS, *FUTURE_ERRORS) as error:
            raised = RuntimeError(f"the reward {self.names[0]} raised {error!r}")
            raise self._name_answer(raised, answers, number) from error
        except Exception as error:
            self._name_answer(error, answers, number)
            raise

    async def _await_function(self, answers: Answers, number: int | None) -> object:
        try:
            return await self.call(answers, number)
        except EXIT_ERRORS as error:
            raised = RuntimeError(f"the reward {self.names[0]} raised {error!r}")
            raise self._name_answer(raised, answers, number) from error
        except Exception as error:
            self._name_answer(error, answers, number)
            raise

    def _read_scores(self, returned: Any, answers: Answers) -> Scores:
        """Return what the function returned, one item for each response, as scores. BadScore: it is something else."""
        name = self.names[0]
        count = len(answers.responses)

        # A value that is not a list of the right length is an error of the function, and not a missing score.
        if not hasattr(returned, "__len__") or isinstance(returned, str | Mapping):
            fix = f"give a list of {count} numbers, one a response"
            raise self._name_answer(BadScore(f"the reward {name} gave {returned!r:.80}: {fix}"), answers)

        if len(returned) != count:
            raise BadScore(f"the reward {name} must return {count} scores, one a response, got {len(returned)}")
        scores = Scores(np.full((count, 1), np.nan))
        if any(isinstance(score, Mapping) for score in returned):
            scores.extras = [extras_of(score) for score in returned]

        for index, item in enumerate(returned):
            # A function in verl's form may return a mapping with the score and other numbers.
            score = item["score"] if isinstance(item, Mapping) and "score" in item else item
            try:
                if score is None or math.isnan(score):
                    scores.reasons[index, 0] = f"it gave {score}"
                    continue
                if math.isinf(score):
                    raise OverflowError
            except (TypeError, ValueError, OverflowError):  # ValueError: a tensor of several numbers
                fix = "give a finite number, or None for no score"
                wrong = BadScore(f"the reward {name} gave {score!r:.80}: {fix}")
                raise self._name_answer(wrong, answers, index) from None

            scores.values[index, 0] = score

        return scores

    def _name_answer(self, error: Exception, answers: Answers, number: int | None = None) -> Exception:
        """Add a note to an exception with the prompt, the target and the response that were being scored; return it."""
        response = "" if number is None else f", response {answers.responses[number]!r:.300}"
        scored = f"prompt {answers.prompt!r:.300}, target {answers.target!r:.100}{response}"
        error.add_note(f"the reward {self.names[0]} scored {scored}")
        return error


def as_verifier(scorer: Any, name: str | None = None) -> Verifier:
    """Return a scorer (a verifier, a function, or an object with `score_group`) as a `Verifier`.

    Args:
        name: of a function's column; None: the function's own. A verifier keeps its names.

    Raises:
        ValueError: it is none of these.
    """
    if hasattr(scorer, "score") and hasattr(scorer, "names"):
        return scorer
    if callable(scorer) or hasattr(scorer, "score_group"):
        return FunctionVerifier(scorer, name)
    raise ValueError(f"a reward must be a function of (prompt, response, target) or a verifier, got {scorer!r:.80}")


def call_of(verifier: Verifier) -> RewardCall:
    """Return the function that calls a verifier with answers: a function as its parameters say, any other verifier by
    `score`, for all responses together."""
    if isinstance(verifier, FunctionVerifier):
        return verifier.call
    return RewardCall(verifier.score, verifier.names[0], is_group=True)


def part_names(verifiers: Sequence[Verifier], names: Sequence[str] | None = None) -> list[str]:
    """Return a different name for each scorer's part of the reward: its own, or the one in `names`; if several are
    equal, the later ones end with a number, as length_2."""
    unique_names: list[str] = []
    for index, verifier in enumerate(verifiers):
        name = verifier.names[0] if isinstance(verifier, FunctionVerifier) else type(verifier).__name__
        if names and index < len(names):
            name = names[index]
        # Numbered, so that two lambdas have two metrics, and not one with their sum.
        repeated = sum(earlier == name or earlier.startswith(f"{name}_") for earlier in unique_names)
        unique_names.append(f"{name}_{repeated + 1}" if name in unique_names else name)
    return unique_names


class Score(NamedTuple):
    """Score of one response, with its parts.

    reward: None if the response is unscored.
    correct: whether it is right; None if that is unknown.
    parts: {name of a scorer: what it adds to the reward}, if there are several scorers.
    steps: (end of a step in characters, reward that the step earns), if steps are scored.
    reason: why there is no reward; "" if there is one.
    extras: additional numbers for metrics.
    """

    reward: float | None
    correct: bool | None
    parts: dict[str, float] | None = None
    steps: list[tuple[int, float]] | None = None
    reason: str = ""
    extras: dict[str, float] | None = None


class Reward:
    """The weighted sum of scorers.

    A response has no reward if one of them does not score it. Functions in TRL's form are the exception: one that does
    not score a response adds nothing, and the response has no reward only if no scorer scores it.

    Args:
        scorers: functions, objects with `score_group`, or verifiers.
        accuracy: the function that decides whether a response is right (a score of at least 1); by default the first
            function among `scorers`.
        weights: what the first scorers are multiplied by; the others by 1.
        names: of the first scorers in metrics; the others have their own.

    Raises:
        ValueError: no scorers, two that learn, or more weights or names than scorers.
    """

    def __init__(
        self,
        scorers: Sequence[Any],
        accuracy: Any = None,
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        if not scorers:
            raise ValueError("a reward needs at least one function, or verifiers")
        check_parts(len(scorers), weights, names)
        self.verifiers = [as_verifier(scorer) for scorer in scorers]

        # If the accuracy function is also a scorer, as by default, it is called only once. A rule that was loaded by
        # name twice is two equal objects.
        functions = [verifier for verifier in self.verifiers if isinstance(verifier, FunctionVerifier)]
        matching = (verifier for verifier in functions if accuracy is None or verifier.function == accuracy)
        self.accuracy: Verifier | None = next(matching, None)
        if self.accuracy is None and accuracy is not None:
            self.accuracy = as_verifier(accuracy)
        learning = [verifier for verifier in self.verifiers if getattr(verifier, "learns", False)]
        if len(learning) > 1:
            raise ValueError("at most one function of a reward can learn")

        self.learner: Any = learning[0] if learning else None
        self.weights = [*(weights or ()), *[1.0] * (len(self.verifiers) - len(weights or ()))]
        self.names = part_names(self.verifiers, names)
        self.calls = [call_of(verifier) for verifier in self.verifiers]
        self._logged: dict[str, set[str]] = {}

    def setup(self) -> None:
        """Set up the scorers that have `setup`, which load models or start sandboxes."""
        for verifier in self.verifiers:
            if hasattr(verifier, "setup"):
                verifier.setup()

    async def score(
        self,
        prompt: object,
        responses: Sequence[str],
        target: str | None,
        completions: Sequence[Completion] | None = None,
    ) -> list[Score]:
        """Return the score of each response to one prompt, in their order, and record the shares of missing scores as
        metrics.

        Args:
            prompt: a `Prompt`, whose row has the columns that scorers name, or a text.
            completions: of the responses, for scorers that read tokens; None: they have only texts.

        Raises:
            MissingColumn: the row does not have a column that a scorer requires.
            Exception: whatever a function raises.
        """
        answers = Answers.from_texts(prompt, responses, target, completions)
        total = np.zeros(len(responses))
        is_scored = np.zeros(len(responses), dtype=bool)  # by at least one scorer

        # What the scorers say of each response.
        correct: list[bool | None] = [None] * len(responses)
        parts: dict[str, np.ndarray] = {}
        steps: list[list[tuple[int, float]]] = [[] for _ in responses]
        reasons: list[str] = [""] * len(responses)
        extras: list[dict[str, float]] = [{} for _ in responses]

        for verifier, call, weight, name in zip(self.verifiers, self.calls, self.weights, self.names, strict=True):
            scores = await scored_by(verifier, call, answers)
            part = parts[name] = weight * scores.values.sum(1)
            for (response, _), reason in scores.reasons.items():
                reasons[response] = reasons[response] or f"{name}: {reason}"
            if not isinstance(verifier, FunctionVerifier):
                report_missing(verifier, scores, self._logged)
            is_scored |= ~np.isnan(part)

            # A function that may abstain adds 0 where it did; the NaN of any other makes the sum NaN.
            total += np.nan_to_num(part) if getattr(verifier, "may_abstain", False) else part
            for response_steps, scored_steps in zip(steps, scores.steps or (), strict=False):
                response_steps += [(end, weight * earned) for end, earned in scored_steps]
            for response_extras, scored_extras in zip(extras, scores.extras or (), strict=False):
                response_extras |= scored_extras
            if verifier is self.accuracy:
                correct = _is_correct(scores)

        total[~is_scored] = np.nan
        # An accuracy function that is not among the scorers is called separately.
        if self.accuracy is not None and self.accuracy not in self.verifiers:
            correct = await self.judge(prompt, responses, target, completions)
        several = len(self.verifiers) > 1

        return [
            Score(
                None if np.isnan(reward) else float(reward),
                right,
                {name: float(part[i]) for name, part in parts.items() if not np.isnan(part[i])} if several else None,
                steps[i] or None,
                reasons[i] if np.isnan(reward) else "",
                extras[i] or None,
            )
            for i, (reward, right) in enumerate(zip(total, correct, strict=True))
        ]

    async def judge(
        self,
        prompt: object,
        responses: Sequence[str],
        target: str | None,
        completions: Sequence[Completion] | None = None,
    ) -> list[bool | None]:
        """Return whether each response is right, as the accuracy function says; None where it gives no score. The
        arguments are the same as `score`'s. ValueError: there is no accuracy function."""
        if self.accuracy is None:
            raise ValueError("evaluation needs a reward for accuracy: set reward.accuracy, or eval.problems to 0")
        answers = Answers.from_texts(prompt, responses, target, completions)
        return _is_correct(await scored_by(self.accuracy, call_of(self.accuracy), answers))

    async def close(self) -> None:
        """Close all scorers, as in `close_all`."""
        await close_all(self.verifiers)


def check_parts(scorers: int, weights: Sequence[float] | None, names: Sequence[str] | None) -> None:
    """Check the weights and names of a number of scorers. ValueError: there are more of them than scorers, a weight is
    not finite, or two names are equal."""
    for kind, values in (("weights", weights), ("names", names)):
        if len(values or ()) > scorers:
            raise ValueError(
                f"reward.{kind} has {len(values or ())} entries for {scorers} functions: give one for each"
            )
    if not all(math.isfinite(weight) for weight in weights or ()):
        raise ValueError(f"reward.weights must be finite numbers, got {weights}")
    if len({*(names or ())}) < len(names or ()):
        raise ValueError(f"reward.names has a name twice: {', '.join(names or ())}")


async def scored_by(verifier: Verifier, call: RewardCall, answers: Answers) -> Scores:
    """Return the scores that a verifier gives to answers; `call` is its `call_of`. MissingColumn: their row does not
    have a column that it requires."""
    return await (verifier.score_answers(answers) if isinstance(verifier, FunctionVerifier) else call(answers))


def extras_of(score: object) -> dict[str, float]:
    """Return the finite numbers in a mapping, without its score; {} if the score is not a mapping.

    >>> extras_of({"score": 1.0, "length": 3})
    {'length': 3.0}
    """
    numbers = score.items() if isinstance(score, Mapping) else ()
    return {
        str(key): float(value)
        for key, value in numbers
        if key != "score" and isinstance(value, bool | int | float) and math.isfinite(value)
    }


def report_missing(verifier: Verifier, scores: Scores, logged: dict[str, set[str]]) -> None:
    """Record the share of a verifier's missing scores in the metrics `missing/NAME`, and log new reasons for them.

    Args:
        logged: {name: reasons that were logged}, at most `REASONS` of each, to which new ones are added.
    """
    if not len(scores.values):
        return  # the share of no responses is undefined

    for name, missing in zip(verifier.names, np.isnan(scores.values).mean(0), strict=True):
        record_metric(f"missing/{name}", float(missing))

    for (_, column), reason in scores.reasons.items():
        name = verifier.names[column]
        reasons = logged.setdefault(name, set())
        if reason not in reasons and len(reasons) < REASONS:
            reasons.add(reason)
            log.warning("verifier %s did not score a response: %s", name, reason)


def _is_correct(scores: Scores) -> list[bool | None]:
    return [None if np.isnan(score) else bool(score >= 1.0) for score in scores.values[:, 0]]
