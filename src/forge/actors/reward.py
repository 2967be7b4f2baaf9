"""Rewards as a service. The functions are the user's or those of `forge.data.rewards`."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from ..controller import ForgeActor, endpoint
from ..observability import Reduce, record_metric

RewardFunction = Callable[..., Any]


class RewardActor(ForgeActor):
    """The sum of one or more reward functions `f(prompt, response, target) -> float | None`, plain or async.

    A function that returns None or NaN could not score: the response stays unscored, whatever the others say.
    A function that raises ends the call with its exception.

    Args:
        functions: callables, or names that `load_reward` resolves.
        accuracy: the function that decides whether a response is right (a score of at least 1); by default the first.
    """

    def __init__(
        self, functions: Sequence[RewardFunction | str], *, accuracy: RewardFunction | str | None = None
    ) -> None:
        if not functions:
            raise ValueError("a reward needs at least one function")
        self.functions = [load_reward(f) if isinstance(f, str) else f for f in functions]
        self.accuracy = load_reward(accuracy) if isinstance(accuracy, str) else accuracy or self.functions[0]

    @endpoint
    async def evaluate_response(self, prompt: Any, response: str, target: str) -> float | None:
        """Score one response; None if it could not be scored."""
        return (await self._score(prompt, [response], target))[0][0]

    @endpoint
    async def evaluate_group(self, prompt: Any, responses: Sequence[str], target: str) -> list[float | None]:
        """Score the responses of one prompt, in order; records `reward`, its spread and `accuracy`."""
        rewards, scores = await self._score(prompt, responses, target)
        for reward in rewards:
            if reward is not None:
                record_metric("reward", reward)
                record_metric("reward", reward, Reduce.STD)
        if self.accuracy is not self.functions[0]:
            scores[0] = await _score_all(self.accuracy, prompt, responses, target)
        for score in scores[0]:
            if score is not None:
                record_metric("accuracy", _right(score))
        return rewards

    @endpoint
    async def is_correct(self, prompt: Any, response: str, target: str) -> bool:
        """Whether a response is right by the accuracy function; what it cannot score is not right."""
        return _right((await _score_all(self.accuracy, prompt, [response], target))[0])

    async def _score(
        self, prompt: Any, responses: Sequence[str], target: str
    ) -> tuple[list[float | None], list[list[float | None]]]:
        """The sum over functions for each response, and each function's scores."""
        scores = [await _score_all(function, prompt, responses, target) for function in self.functions]
        if len(scores) > 1:
            for function, column in zip(self.functions, scores, strict=True):
                for score in column:
                    if score is not None:
                        record_metric(f"reward/{_name(function)}", score)
        sums = [None if None in row else sum(row) for row in zip(*scores, strict=True)]
        return sums, scores


async def _score_all(
    function: RewardFunction, prompt: Any, responses: Sequence[str], target: str
) -> list[float | None]:
    """One function over several responses. Plain functions run in a thread, so that a slow one blocks nobody."""
    prompt = str(prompt)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        scores = await asyncio.gather(*(function(prompt, response, target) for response in responses))
    else:
        scores = await asyncio.to_thread(lambda: [function(prompt, response, target) for response in responses])
    return [None if score is None or math.isnan(score) else float(score) for score in scores]


def _right(score: float | None) -> bool:
    return score is not None and score >= 1.0


def load_reward(name: str) -> RewardFunction:
    """Resolve `package.module:Name`, or a name from `forge.data.rewards`; a class is instantiated without arguments.

    Raises:
        ValueError: nothing of this name, or it is not callable.
    """
    module_name, _, attribute = name.rpartition(":")
    try:
        found = getattr(importlib.import_module(module_name or "forge.data.rewards"), attribute)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ValueError(f"reward {name!r} was not found ({error}); write package.module:Name") from error
    try:
        made = found() if inspect.isclass(found) else found
    except TypeError as error:
        raise ValueError(f"reward {name!r} cannot be made without arguments ({error}); name a function") from error
    if not callable(made):
        raise ValueError(f"reward {name!r} is not callable")
    return made


def _name(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)
