"""Rewards as a service: scores responses in separate processes."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..config.plugin import load_plugin
from ..rewards.reward import Reward, Score
from ..rewards.rules import load_reward
from ..runtime.controller import ForgeActor, endpoint
from ..types import Completion


class RewardActor(ForgeActor):
    """Component that scores responses with a `forge.rewards.reward.Reward` in its processes.

    Args:
        functions: what the reward is the weighted sum of. Each is a function, a verifier, an object with `score_group`,
            a name that `load_reward` resolves, or a mapping `{"use": "package.module:Name", **settings}`.
        verifiers: a `forge_verifiers.config.VerifiersConfig`, whose scores are added without a weight.
        accuracy: the function that decides whether a response is right, or its name, see `Reward`.
        weights: of the functions, see `Reward`.
        names: of the functions, see `Reward`.

    Raises:
        ValueError: there are neither functions nor verifiers, or `weights` and `names` are not theirs.
    """

    constructor_checks = True

    def __init__(
        self,
        functions: Sequence[Any] | None = None,
        *,
        verifiers: Any = None,
        accuracy: Any = None,
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.verifiers, self.weights, self.names = verifiers, weights, names
        self.accuracy = load_reward(accuracy) if isinstance(accuracy, str) else accuracy
        self.scorers = list[Any]()

        # A function's name, a mapping `{use: package.module:Class, ...}`, or the function or verifier itself.
        for index, item in enumerate(functions or ()):
            scorer = load_reward(item) if isinstance(item, str) else item
            if isinstance(scorer, Mapping):
                scorer = load_plugin(scorer, f"reward.functions[{index}]")
            self.scorers.append(scorer)

        if verifiers is None:
            Reward(self.scorers, self.accuracy, weights, names)  # a wrong part raises here, before a process starts

    def setup(self) -> None:
        """Prepare the scorers: load models, start sandboxes, build the panel of verifiers."""
        panels = [] if self.verifiers is None else [self.verifiers.panel()]
        self.reward = Reward([*self.scorers, *panels], self.accuracy, self.weights, self.names)
        self.reward.setup()

    async def teardown(self) -> None:
        """Close the scorers, if they were set up."""
        if hasattr(self, "reward"):
            await self.reward.close()

    @endpoint
    async def score(
        self,
        prompt: Any,
        responses: Sequence[str],
        target: str | None,
        evaluation: bool = False,
        completions: Sequence[Completion] | None = None,
    ) -> list[Score]:
        """Return the scores of the responses of one prompt, in their order.

        Args:
            prompt: a `Prompt`, whose row has the columns that functions name, or a text.
            responses: the texts to score.
            target: the right answer of the prompt, if it has one.
            evaluation: score without rewards if one of the scorers learns from what it scores, or there is no accuracy
                function: each score then only says whether the response is right.
            completions: the responses with their tokens, for functions that read these.
        """
        if evaluation and (self.reward.learner is not None or self.reward.accuracy is None):
            judgements = await self.reward.judge(prompt, responses, target, completions)
            return [Score(None, is_right) for is_right in judgements]
        return await self.reward.score(prompt, responses, target, completions)

    @endpoint
    async def evaluate_group(self, prompt: Any, responses: Sequence[str], target: str) -> list[float | None]:
        """Return the rewards of the responses of one prompt; None for those that could not be scored."""
        return [score.reward for score in await self.score(prompt, responses, target)]

    @endpoint
    async def evaluate_response(self, prompt: Any, response: str | Completion, target: str) -> float | None:
        """Return the reward of one response; None if it could not be scored."""
        completion = response if isinstance(response, Completion) else Completion(response)
        return (await self.reward.score(prompt, [completion.text], target, [completion]))[0].reward

    evaluate = evaluate_response

    @endpoint
    async def state_dict(self) -> dict[str, Any] | None:
        """Return the state of this replica's scorer that learns, with the replica's index; None if none learns."""
        if self.reward.learner is None:
            return None
        return {"replica": self.context.replica, **await self.reward.learner.state_dict()}

    @endpoint(catch_up=True)
    async def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Restore the state of the scorer that learns: this replica's own, or the first one if it has none.

        Args:
            states: what `state_dict` returned in all replicas.

        Raises:
            ValueError: no scorer of this reward learns, or the states are of another reward.
        """
        if self.reward.learner is None:
            raise ValueError(
                "the checkpoint has the state of a reward that learns, and no configured reward learns: resume with "
                "the reward of the checkpoint"
            )
        own_states = [state for state in states if state["replica"] == self.context.replica]
        await self.reward.learner.load_state_dict((own_states or states)[0])
