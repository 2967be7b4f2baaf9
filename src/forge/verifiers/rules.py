"""Verifiers that are functions: rules, the comparison of final answers, and how often each answer comes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..data.rewards import MathReward, final_answer
from ..data.rewards.compare import equal
from .threads import Turns, within
from .verifier import Scores, Unscored, collect

TOLERANCE = 1e-6


class Rule:
    """A reward function `f(prompt, response, target) -> float | None`, plain or async, as a verifier.

    None, NaN and exceptions are no score. A function that needs a target and gets None must say so itself, by one of
    those.

    Args:
        function: called with one response at a time, a plain one in a thread, of which each rule has four. Responses of
            one call are scored one after the other by a plain function, all at once by an async one.
        name: of the column; default the function's own.
        time_limit: seconds for one response, which then has no score. An async function is cancelled; a plain one
            cannot be ended, and its thread goes on.
        version: a text that changes when the function's scores could. Without it its scores are not cached, for nothing
            else can say so.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        *,
        time_limit: float = 10.0,
        version: str | None = None,
    ) -> None:
        if not callable(function):
            raise ValueError(f"a rule is a function of (prompt, response, target), got {function!r}")
        if time_limit <= 0:
            raise ValueError(f"time_limit must be above 0 seconds, got {time_limit}")
        self.function, self.time_limit = function, time_limit
        self.names: tuple[str, ...] = (str(name or getattr(function, "__name__", type(function).__name__)),)
        self.fingerprint = None if version is None else f"rule {self.names[0]} {version}"
        self._turns = Turns()
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    @property
    def progress(self) -> int:
        """Responses that it is done with: the function has returned, raised or run into its limit."""
        return self._turns.progress

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """One number for each response."""

        async def awaited(response: str) -> Any:
            with self._turns.counted():
                return await within(self.time_limit, self.function(prompt, response, target), self.names[0])

        if self._is_async:
            return await collect([awaited(response) for response in responses], 1)
        outcomes: list[Any] = []
        for response in responses:
            try:
                call = partial(self.function, prompt, response, target)
                outcomes.append(await self._turns(call, limit=self.time_limit, what=self.names[0]))
            except Exception as error:
                outcomes.append(error)
        return Scores.of(outcomes, 1)


class MathVerifier(Rule):
    """1 if the final answer of a response equals the target, else 0; see `forge.data.rewards.MathReward`.

    An answer that takes too long to compare is wrong. There is no score without a target, or where the target itself
    takes too long.
    """

    def __init__(self, name: str = "math", *, tolerance: float = TOLERANCE, time_limit: float = 10.0) -> None:
        reward = MathReward(tolerance=tolerance)

        def matches(prompt: str, response: str, target: str | None) -> float:
            if target is None or not target.strip():
                raise Unscored("there is no target to compare with")
            right = reward.is_right(response, target)
            if right is None:
                raise Unscored("the target takes too long to compare")
            return float(right)

        super().__init__(matches, name, time_limit=time_limit, version=f"3 {reward}")
        self._turns = Turns(1)  # one process compares for all, and waiting for it must not count as an answer's time


class AnswerFrequency:
    """The share of the other responses to the prompt that have the same answer, in [0, 1] (Saad-Falcon et al. 2025).

    A response is not counted for itself, so that a lone answer has 0, and so has a response without an answer. A single
    response has no score: there is no other to agree with.

    Args:
        extract: the answer of a response, None where it has none. Where it raises, the response has no score and is
            not counted.
        same: whether two answers are the same. By default final answers are compared as text, numbers and
            symbolically, see `forge.data.rewards`, and what another function extracts as it is.
            Each answer is compared with the first of each kind before it.
        time_limit: seconds for all responses of a prompt.
        version: of the two functions, as of `Rule`; not needed for the defaults.
    """

    grouped = True

    def __init__(
        self,
        extract: Callable[[str], str | None] = final_answer,
        *,
        same: Callable[[str, str], bool] | None = None,
        name: str = "answer_frequency",
        time_limit: float = 30.0,
        version: str | None = None,
    ) -> None:
        self.extract, self.time_limit = extract, time_limit
        by_default = (lambda a, b: bool(equal(a, b, TOLERANCE))) if extract is final_answer else str.__eq__
        self.same: Callable[[str, str], bool] = same or by_default
        self.names: tuple[str, ...] = (name,)
        known = version or ("default" if extract is final_answer and same is None else None)
        self.fingerprint = None if known is None else f"answer frequency {known}"
        self._turns = Turns()

    @property
    def progress(self) -> int:
        """Prompts that it is done with."""
        return self._turns.progress

    async def score(self, prompt: str, responses: Sequence[str], target: str | None = None) -> Scores:
        """One number for each response; they depend on each other."""
        if len(responses) < 2:
            return Scores.none(len(responses), 1, "a single response has no others to agree with")
        outcomes = await self._turns(lambda: self._shares(responses), limit=self.time_limit, what=self.names[0])
        return Scores.of(outcomes, 1)

    def _shares(self, responses: Sequence[str]) -> list[float | Exception]:
        kinds: list[str] = []
        kind_of: dict[str, int] = {}
        found: list[int | Exception | None] = []
        for response in responses:
            try:
                answer = self.extract(response)
                if answer is not None and answer not in kind_of:
                    kind_of[answer] = next((i for i, kind in enumerate(kinds) if self.same(answer, kind)), len(kinds))
                    if kind_of[answer] == len(kinds):
                        kinds.append(answer)
                found.append(None if answer is None else kind_of[answer])
            except Exception as error:
                found.append(error)
        read = [kind for kind in found if not isinstance(kind, Exception)]
        if len(read) < 2:
            alone = Unscored("of no other response the answer could be read")
            return [kind if isinstance(kind, Exception) else alone for kind in found]
        return [
            kind if isinstance(kind, Exception) else 0.0 if kind is None else (read.count(kind) - 1) / (len(read) - 1)
            for kind in found
        ]
