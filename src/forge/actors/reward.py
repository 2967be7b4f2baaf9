"""Rewards as a service: functions of the user's or of `forge.data.rewards`, verifiers, plug-ins."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..controller import ForgeActor, endpoint
from ..data.rewards.load import RewardFunction, load_reward
from ..observability import Reduce, record_metric
from ..plugin import load_plugin
from ..verifiers.reward import PanelReward
from ..verifiers.spec import VerifiersConfig
from ..verifiers.verifier import Verifier


class RewardActor(ForgeActor):
    """The sum of rewards: functions `f(prompt, response, target) -> float | None`, plain or async; objects whose
    `score_group(prompt, responses, target)` sees all responses of a prompt; verifiers.

    What returns None or NaN could not score: the response stays unscored, whatever the others say. What raises ends the
    call with its exception, and so does what is no finite number, or another number of scores than of responses
    (ValueError).

    Args:
        functions: callables or such objects; names that `load_reward` resolves; verifiers, or mappings
            `{"use": "package.module:Name", **settings}` that name one, see `forge.verifiers.Verifier`.
        verifiers: models, judges and rules whose scores are added as they are.
        accuracy: the function that decides whether a response is right (a score of at least 1); by default the first
            of `functions` that is no verifier, so that without one nothing is known to be right.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction | Verifier | Mapping[str, Any] | str] | None = None,
        *,
        verifiers: VerifiersConfig | None = None,
        accuracy: RewardFunction | str | None = None,
    ) -> None:
        self.functions: list[Any] = []
        self._plugins: list[Any] = []
        for number, item in enumerate(functions or ()):
            made: Any = load_reward(item) if isinstance(item, str) else item
            if isinstance(made, Mapping):
                made = load_plugin(made, f"reward.functions[{number}]")
            if hasattr(made, "score") and not hasattr(made, "score_group"):
                self._plugins.append(made)
                made = PanelReward(made, type(made).__name__)
            self.functions.append(made)
        first = next((one for one in self.functions if not isinstance(one, PanelReward)), None)
        self.accuracy = load_reward(accuracy) if isinstance(accuracy, str) else accuracy or first
        self.verifiers = verifiers
        if not self.functions and verifiers is None:
            raise ValueError("a reward needs at least one function, or verifiers")
        learning = [plugin for plugin in self._plugins if getattr(plugin, "learns", False)]
        if len(learning) > 1:
            raise ValueError("only one of a reward's functions may learn")
        self._learner = learning[0] if learning else None

    def setup(self) -> None:
        if self.verifiers is not None:
            self.functions.append(PanelReward(self.verifiers.panel()))
        for plugin in self._plugins:
            if hasattr(plugin, "setup"):
                plugin.setup()

    async def teardown(self) -> None:
        closing = [reward.close() for reward in self.functions if isinstance(reward, PanelReward)]
        for outcome in await asyncio.gather(*closing, return_exceptions=True):  # all, also if one fails
            if isinstance(outcome, BaseException):
                raise outcome

    @endpoint
    async def state_dict(self) -> dict[str, Any] | None:
        """What a function that learns has learned in this replica; None if none does."""
        if self._learner is None:
            return None
        return {"replica": self.context.replica, **await self._learner.state_dict()}

    @endpoint(catch_up=True)
    async def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Take up this replica's own of the states of all replicas, or one of them where it has none.

        ValueError: this reward does not learn, or the states are of another one.
        """
        if self._learner is None:
            raise ValueError("the run began with a reward that learns, and this one does not: resume with that one")
        own = [state for state in states if state["replica"] == self.context.replica]
        await self._learner.load_state_dict((own or states)[0])

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
        if self.accuracy is not None:
            at = self.functions.index(self.accuracy) if self.accuracy in self.functions else None
            known = scores[at] if at is not None else None
            if known is None:
                known = await _score_all(self.accuracy, prompt, responses, target)
            for score in known:
                if score is not None:
                    record_metric("accuracy", _right(score))
        return rewards

    @endpoint
    async def is_correct(self, prompt: Any, response: str, target: str) -> bool:
        """Whether a response is right by the accuracy function; what it cannot score is not right.

        ValueError: there is no such function.
        """
        if self.accuracy is None:
            raise ValueError("nothing says which responses are right: set reward.accuracy, or eval.problems to 0")
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
    if hasattr(function, "score_group"):
        scores = await function.score_group(prompt, responses, target)
    elif inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        scores = await asyncio.gather(*(function(prompt, response, target) for response in responses))
    else:
        scores = await asyncio.to_thread(lambda: [function(prompt, response, target) for response in responses])
    if len(scores) != len(responses):
        raise ValueError(f"the reward {_name(function)} gave {len(scores)} scores for {len(responses)} responses")
    return [_number(score, function) for score in scores]


def _number(score: Any, function: RewardFunction) -> float | None:
    try:
        if score is None or math.isnan(score):
            return None
        if math.isinf(score):
            raise OverflowError
    except (TypeError, OverflowError):
        wanted = "give a finite number, or None for no score"
        raise ValueError(f"the reward {_name(function)} gave {score!r:.80}: {wanted}") from None
    return float(score)


def _right(score: float | None) -> bool:
    return score is not None and score >= 1.0


def _name(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)
