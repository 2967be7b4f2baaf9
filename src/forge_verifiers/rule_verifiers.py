"""Verifiers without a model: reward functions, the comparison of final answers, and the frequency of answers."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from time import monotonic
from typing import Any

from forge.rewards.rules import MathReward, final_answer
from forge.rewards.rules.comparison import TOLERANCE, first_equal
from forge.rewards.verifier import Scores, Unscored, collect_scores
from forge_verifiers.threads import Turns, await_within


class Rule:
    """A verifier that scores responses by a reward function.

    A response for which the function returns None or NaN, or raises an error, is unscored.

    Args:
        function: `f(prompt, response, target) -> float | None`, plain or async. A plain function runs in one of the
            rule's four threads, for the responses of a call one after the other; an async one runs for all of them
            concurrently. If it needs a target and gets None, it should return None.
        name: the name of the column; None: the function's name.
        time_limit: seconds for one response, which is unscored after that. An async function is cancelled then; a plain
            one continues in its thread, as Python cannot stop threads.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        *,
        time_limit: float = 10.0,
    ) -> None:
        self.function, self.time_limit = function, time_limit
        self.names: tuple[str, ...] = (str(name or getattr(function, "__name__", type(function).__name__)),)
        self._turns = Turns()
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    @property
    def progress(self) -> int:
        """Return the number of responses for which the function has returned, raised an error or timed out."""
        return self._turns.progress

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """Return scores [responses, 1] of the responses to one prompt; NaN with a reason where one is unscored."""

        async def await_score(response: str) -> float | None:
            with self._turns.counted():
                return await await_within(self.time_limit, self.function(prompt, response, target), self.names[0])

        if self._is_async:
            return await collect_scores([await_score(response) for response in responses], 1)

        # One after the other, so that a function that hangs blocks one thread, not one for each response.
        outcomes: list[float | Exception | None] = []
        for response in responses:
            try:
                outcomes.append(
                    await self._turns(
                        partial(self.function, prompt, response, target), limit=self.time_limit, name=self.names[0]
                    )
                )
            except Exception as error:
                outcomes.append(error)

        return Scores.from_outcomes(outcomes, 1)


class MathVerifier(Rule):
    """A verifier that gives 1 to a response whose final answer equals the target, otherwise 0.

    `forge.rewards.rules.MathReward` says how they are compared. An answer that takes too long to compare is wrong. A
    response is unscored if there is no target, or the target itself takes too long.

    Args:
        name: the name of the column.
        tolerance: the difference up to which numbers are equal.
        time_limit: seconds for one response.
    """

    def __init__(self, name: str = "math", *, tolerance: float = TOLERANCE, time_limit: float = 10.0) -> None:
        reward = MathReward(tolerance=tolerance)

        def matches_target(prompt: str, response: str, target: str | None) -> float:
            if target is None or not target.strip():
                raise Unscored("there is no target to compare with")
            is_right = reward.is_right(response, target)
            if is_right is None:
                raise Unscored("the target takes too long to compare")
            return float(is_right)

        super().__init__(matches_target, name, time_limit=time_limit)
        # One at a time: a single process compares all answers, and waiting for it must not count for `time_limit`.
        self._turns = Turns(1)


class AnswerFrequency:
    """A verifier that gives a response the share of the other responses with the same answer (Saad-Falcon et al. 2025).

    Scores are from 0 to 1: 0 for an answer that no other response has, and for a response without an answer. A single
    response is unscored.

    Args:
        extract: returns the answer of a response, None if it has none. If it raises an error, the response is unscored
            and not counted. Answers of the default, `final_answer`, are compared as text, as numbers and symbolically
            (see `forge.rewards.rules`), others as text. An answer is compared with at most 32 different ones.
        name: the name of the column.
        time_limit: seconds for all responses of a prompt.
    """

    def __init__(
        self,
        extract: Callable[[str], str | None] = final_answer,
        *,
        name: str = "answer_frequency",
        time_limit: float = 30.0,
    ) -> None:
        self.extract, self.time_limit = extract, time_limit
        self.names: tuple[str, ...] = (name,)
        self._turns = Turns()

    @property
    def progress(self) -> int:
        """Return the number of prompts whose responses have been scored."""
        return self._turns.progress

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """Return scores [responses, 1] of all responses to one prompt, which are compared with each other."""
        if len(responses) < 2:
            return Scores.none(len(responses), 1, "a single response has no others to agree with")

        def kinds_of_answers() -> list[str | Exception | None]:
            """Return for each response the first answer that equals its own, its kind, or the error in reading it."""
            deadline = monotonic() + self.time_limit  # after which the caller has given up, but this thread continues
            kinds: list[str | Exception | None] = []
            for response in responses:
                try:
                    answer = self.extract(response)
                    if answer is not None and self.extract is final_answer:
                        known = (kind for kind in dict.fromkeys(kinds) if isinstance(kind, str))
                        answer = first_equal(answer, takewhile(lambda _: monotonic() < deadline, known))
                    kinds.append(answer)
                except Exception as error:
                    kinds.append(error)
            return kinds

        kinds = await self._turns(kinds_of_answers, limit=self.time_limit, name=self.names[0])
        counted_kinds = [kind for kind in kinds if not isinstance(kind, Exception)]
        outcomes: list[float | Exception] = []

        for kind in kinds:
            if isinstance(kind, Exception):
                outcomes.append(kind)
            elif len(counted_kinds) < 2:
                outcomes.append(Unscored("of no other response the answer could be read"))
            elif kind is None:
                outcomes.append(0.0)
            else:
                # Without the response itself.
                outcomes.append((counted_kinds.count(kind) - 1) / (len(counted_kinds) - 1))

        return Scores.from_outcomes(outcomes, 1)
