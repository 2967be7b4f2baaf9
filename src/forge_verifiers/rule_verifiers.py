"""Verifiers without a model: rules, the comparison of final answers, and answer frequency."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any

from forge.rewards.rules import MathReward, final_answer
from forge.rewards.rules.comparison import load_comparison
from forge.rewards.verifier import Scores, Unscored, collect_scores
from forge_verifiers.threads import Turns, await_within

TOLERANCE = 1e-6
MAX_KINDS = 32  # an answer is compared with; a symbolic comparison may take most of a second


class Rule:
    """A reward function `f(prompt, response, target) -> float | None`, plain or async, as a verifier.

    None, NaN and exceptions leave a response unscored; so should a function that needs a target and gets None.

    Args:
        function: called with one response at a time. A plain function runs in one of the rule's four threads, on the
            responses of a call one after the other; an async one runs on all of them concurrently.
        name: of the column; default the function's name.
        time_limit: seconds for one response, which is unscored after that. An async function is cancelled; a plain one
            continues in its thread, for Python cannot stop threads.
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
        """Return number of responses for which the function returned, raised or timed out."""
        return self._turns.progress

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """Return one number for each response."""

        async def await_score(response: str) -> float | None:
            with self._turns.counted():
                return await await_within(self.time_limit, self.function(prompt, response, target), self.names[0])

        if self._is_async:
            return await collect_scores([await_score(response) for response in responses], 1)

        # One after the other: a function that hangs takes one thread, not one for each response.
        outcomes: list[float | Exception | None] = []
        for response in responses:
            try:
                call = partial(self.function, prompt, response, target)
                outcomes.append(await self._turns(call, limit=self.time_limit, name=self.names[0]))
            except Exception as error:
                outcomes.append(error)

        return Scores.from_outcomes(outcomes, 1)


class MathVerifier(Rule):
    """1 if the final answer of a response equals the target, else 0; see `forge.rewards.rules.MathReward`.

    An answer that takes too long to compare is wrong; without a target, or if the target itself takes too long, the
    response is unscored.
    """

    def __init__(self, name: str = "math", *, tolerance: float = TOLERANCE, time_limit: float = 10.0) -> None:
        reward = MathReward(tolerance=tolerance)

        def matches_target(prompt: str, response: str, target: str | None) -> float:
            if target is None or not target.strip():
                raise Unscored("there is no target to compare with")
            # A slow target is a fault of the data, and not of the response.
            right = reward.is_right(response, target)
            if right is None:
                raise Unscored("the target takes too long to compare")
            return float(right)

        super().__init__(matches_target, name, time_limit=time_limit)
        # One process compares for all threads: waiting for it must not count for `time_limit`.
        self._turns = Turns(1)


class AnswerFrequency:
    """The share of the other responses to the prompt that have the same answer, in [0, 1] (Saad-Falcon et al. 2025).

    A unique answer has 0, and so has a response without an answer. A single response is unscored.

    Args:
        extract: the answer of a response, or None. If it raises, the response is unscored and not counted. Answers of
            the default are compared as text, numbers and symbolically (see `forge.rewards.rules`), others as text, each
            with the first of each of the first MAX_KINDS kinds before it.
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
        """Return number of finished prompts."""
        return self._turns.progress

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """Return one number for each response; they depend on each other."""
        if len(responses) < 2:
            return Scores.none(len(responses), 1, "a single response has no others to agree with")

        def is_equal(answer: str, kind: str) -> bool:
            by_value = self.extract is final_answer
            return bool(load_comparison().are_equal(answer, kind, TOLERANCE)) if by_value else answer == kind

        def kinds_of_answers() -> list[str | Exception | None]:
            """Return each answer as the first one that is the same, or what `extract` or the comparison raised."""
            end = monotonic() + self.time_limit  # the thread must not go on comparing after its time
            kinds: list[str | Exception | None] = []
            for response in responses:
                try:
                    answer = self.extract(response)
                    known = [kind for kind in dict.fromkeys(kinds) if isinstance(kind, str)][:MAX_KINDS]
                    if answer is not None:
                        same = (kind for kind in known if monotonic() < end and is_equal(answer, kind))
                        answer = next(same, answer)
                    kinds.append(answer)
                except Exception as error:
                    kinds.append(error)
            return kinds

        # The kinds of all responses in one thread, then each one's frequency among the others.
        kinds = await self._turns(kinds_of_answers, limit=self.time_limit, name=self.names[0])
        read = [kind for kind in kinds if not isinstance(kind, Exception)]
        outcomes: list[float | Exception] = []

        for kind in kinds:
            if isinstance(kind, Exception):
                outcomes.append(kind)
            elif len(read) < 2:
                outcomes.append(Unscored("of no other response the answer could be read"))
            else:
                outcomes.append(0.0 if kind is None else (read.count(kind) - 1) / (len(read) - 1))

        return Scores.from_outcomes(outcomes, 1)
