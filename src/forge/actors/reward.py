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
        total = 0.0
        for function in self.functions:
            score = await _call(function, str(prompt), response, target)
            if score is None or math.isnan(score):
                return None
            total += score
            if len(self.functions) > 1:
                record_metric(f"reward/{_name(function)}", score)
        return total

    @endpoint
    async def evaluate_group(self, prompt: Any, responses: Sequence[str], target: str) -> list[float | None]:
        """Score the responses of one prompt, in order; records `reward`, its spread and `accuracy`."""
        rewards = [await self.evaluate_response(prompt, response, target) for response in responses]
        for response, reward in zip(responses, rewards, strict=True):
            if reward is not None:
                record_metric("reward", reward)
                record_metric("reward", reward, Reduce.STD)
            record_metric("accuracy", await self.is_correct(prompt, response, target))
        return rewards

    @endpoint
    async def is_correct(self, prompt: Any, response: str, target: str) -> bool:
        """Whether a response is right by the accuracy function."""
        score = await _call(self.accuracy, str(prompt), response, target)
        return score is not None and score >= 1.0


async def _call(function: RewardFunction, prompt: str, response: str, target: str) -> float | None:
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        score = await function(prompt, response, target)
    elif getattr(function, "quick", False):
        score = function(prompt, response, target)
    else:
        # A slow function must not keep this process from answering anyone else.
        score = await asyncio.to_thread(function, prompt, response, target)
    return None if score is None else float(score)


def load_reward(name: str) -> RewardFunction:
    """Resolve `package.module:Name`, or a name from `forge.data.rewards`; a class is instantiated without arguments.

    Raises:
        ValueError: nothing of this name, or it is not callable.
    """
    module_name, _, attribute = name.rpartition(":")
    try:
        found = getattr(importlib.import_module(module_name or "forge.data.rewards"), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"reward {name!r} was not found ({error}); write package.module:Name") from error
    made = found() if inspect.isclass(found) else found
    if not callable(made):
        raise ValueError(f"reward {name!r} is not callable")
    return made


def _name(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)
