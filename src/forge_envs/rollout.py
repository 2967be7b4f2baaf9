"""Rollout of episodes: the policy and an environment take turns until the environment or a limit ends the episode."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from random import Random
from typing import Any

import numpy as np

from forge.envs.group import GroupEnv, PolicyService
from forge.observability import record_metric
from forge.types import Completion, Episode, Origin, Sample, Turn

from .dialogue import Dialogue
from .environment import Environment, InfrastructureError, Message, Step

log = logging.getLogger(f"forge.{__name__}")
_CLOSING = 10.0  # seconds within which an environment must close


async def rollout(
    policy: PolicyService,
    env: Environment,
    task: Any,
    *,
    dialogue: Dialogue,
    seed: int = 0,
    sample: int = 0,
    max_turns: int = 8,
    max_tokens: int = 1024,
    max_turn_tokens: int | None = None,
    step_timeout: float = 60.0,
    retries: int = 2,
    **sampling: Any,
) -> Episode:
    """Play one episode of an environment, and return it with the tokens that the policy read and sampled.

    The tokens are in one array that only grows. If the conversation is rewritten, by the environment or by a chat
    template with `thoughts="template"`, a new branch starts, which has the earlier ones in `Episode.branches`.

    Args:
        policy: a service of generators.
        env: the environment, which is closed at the end.
        task: what the environment's `reset` gets.
        dialogue: converts between messages and tokens.
        seed: the environment's seed.
        sample: the number of this episode of the same task; with `seed` it determines the turns' seeds.
        max_turns: the limit for the policy's turns.
        max_tokens: the limit for the tokens of each branch, which include its prompt.
        max_turn_tokens: the limit for the tokens of one turn; None: as many as the branch has left.
        step_timeout: seconds within which the environment must answer each call.
        retries: how often an episode is played again after an `InfrastructureError`.
        sampling: fields of `forge.types.Sampling` that override the policy's defaults.

    Returns:
        The reward is the sum of the steps' rewards; None if the environment failed or could not score a step. `info`
        has "stop", why the episode ended ("terminated" or "truncated" by the environment, "max_turns", "max_tokens",
        "infrastructure"), "messages", and "environment", the info of the last step.

    Raises:
        Exception: any of the policy, or of the environment except `InfrastructureError`.
    """
    for attempt in range(retries + 1):
        played = _Played(dialogue, max_tokens, step_timeout, turn_seeds(seed, sample, attempt))
        try:
            # Within a session one replica gets all turns: it has the cached keys and values of the earlier ones.
            async with policy.session() if hasattr(policy, "session") else nullcontext():
                played.stop = await played.play(policy, env, task, seed, max_turns, max_turn_tokens, sampling)
            break
        except InfrastructureError as error:
            played.stop, played.error = "infrastructure", str(error)
        except Exception as error:
            turns = [message["content"] for message in played.messages if message["role"] == "assistant"]
            last_turn = f", after the turn {turns[-1]!r:.300}" if turns else ""
            error.add_note(f"while {type(env).__name__} was played on task {str(task)[:300]!r}{last_turn}")
            raise
        finally:
            played.attempts = attempt + 1
            # A failed close is only logged: the episode is valid without it.
            try:
                async with asyncio.timeout(min(step_timeout, _CLOSING)):
                    await env.close()
            except (InfrastructureError, TimeoutError) as error:
                log.warning(
                    "closing the environment %s failed: %s",
                    type(env).__name__,
                    str(error) or f"no answer within {_CLOSING:g} s",
                )

    return played.episode()


class Branch:
    """A sequence of tokens that only grows, with the mask, log-probability and weight version of each token."""

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self.mask: list[bool] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.turns: list[Turn] = []
        self.origins: set[Origin] = set()
        self.experts: np.ndarray | None = None
        self.observe(prompt)

    def observe(self, tokens: Sequence[int]) -> None:
        """Append tokens that the policy reads and that are not trained."""
        self.tokens += tokens
        self.mask += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)

    def append_turn(self, completion: Completion, *, is_trained: bool = True) -> None:
        """Append a turn of the policy, which continues the branch's tokens; one that is not trained is only read."""
        start, ids = len(self.tokens), completion.token_ids
        if is_trained:
            self.tokens += ids
            self.mask += [True] * len(ids)
            self.logprobs += completion.logprobs
            self.versions += completion.versions
            self.turns.append(Turn(start, len(self.tokens), completion.version, completion.finish))
            self.origins |= {
                Origin(version, completion.identities.get(version, ""), completion.sampled_by)
                for version in {*completion.versions}
            }
        else:
            self.observe(ids)

        # A turn's experts include those of its context. Earlier turns have recorded the same tokens when they were
        # sampled, except their last token, which was only read by the turn after them.
        if completion.experts is not None:
            experts = completion.experts.copy()
            if self.experts is not None:
                experts[: len(self.experts) - 1] = self.experts[:-1]
            self.experts = experts

    @property
    def reward(self) -> float:
        """Return the sum of the rewards of the turns."""
        return sum(turn.reward for turn in self.turns)

    def episode(self, reward: float | None, **fields: Any) -> Episode:
        """Return the tokens up to the last turn as an episode, as those after it are not trained.

        Args:
            reward: None for a branch without a turn, of which all tokens are returned.
            fields: further arguments of `Episode.played`.
        """
        end = self.turns[-1].end if self.turns else len(self.tokens)
        return Episode.played(
            self.tokens[:end],
            self.mask[:end],
            self.logprobs[:end],
            self.versions[:end],
            turns=self.turns,
            reward=reward,
            origins=self.origins,
            experts=self.experts,
            **fields,
        )


def turn_seeds(seed: int, sample: int, attempt: int) -> Iterator[int]:
    """Yield the seeds of the policy's turns in one attempt at an episode; the iterator is infinite."""
    random = Random(f"{seed}/{sample}/{attempt}")
    while True:
        yield random.getrandbits(48)


class _Played:
    """State of one attempt at an episode."""

    def __init__(self, dialogue: Dialogue, max_tokens: int, step_timeout: float, seeds: Iterator[int]) -> None:
        self.dialogue, self.max_tokens, self.step_timeout, self.seeds = dialogue, max_tokens, step_timeout, seeds
        self.branches = [Branch()]
        self.messages: list[Message] = []
        self.context: list[Message] = []  # the messages of the last branch
        self.scored, self.stop, self.error, self.attempts = True, "", "", 0
        self.calls = self.unread_calls = 0
        self.info: Mapping[str, Any] = {}

    async def play(
        self,
        policy: PolicyService,
        env: Environment,
        task: Any,
        seed: int,
        max_turns: int,
        max_turn_tokens: int | None,
        sampling: dict[str, Any],
    ) -> str:
        """Play the episode, and return why it ended; takes the arguments of `rollout`.

        Raises:
            InfrastructureError: the environment failed or timed out.
            ValueError: the environment ended the episode at reset, or gave a reward that is not finite.
        """
        name = type(env).__name__
        step = await self._await_answer(env.reset(task, seed=seed), f"{name}.reset")
        if step.done:
            raise ValueError(f"{name}.reset returned a finished episode (done): it must return one that can be played")
        tools = step.tools
        self.messages += step.messages
        self.context += step.messages

        branch = self.branches[0] = Branch(self.dialogue.initial(step.messages, tools))
        for _ in range(max_turns):
            tokens_left = self.max_tokens - len(branch.tokens)
            if tokens_left < 1:
                return "max_tokens"

            # One turn: the policy continues the branch, up to the limits of the turn and of the branch.
            completion: Completion = await policy.generate.route(
                list(branch.tokens),
                max_tokens=min(tokens_left, max_turn_tokens or tokens_left),
                stop_token_ids=self.dialogue.stop_ids,
                seed=next(self.seeds),
                **sampling,
            )
            if list(completion.prompt_ids) != branch.tokens:
                raise ValueError(
                    f"the completion's {len(completion.prompt_ids)} prompt tokens differ from the episode's tokens: "
                    "the policy must sample from the given tokens"
                )
            branch.append_turn(completion)
            action = self.dialogue.read(completion.token_ids, tools, truncated=completion.finish == "length")
            self.calls += len(action.calls)
            self.unread_calls += len(action.errors)
            self.messages.append({"role": "assistant", "content": action.text})
            self.context.append(self.dialogue.turn_message(action))

            # The environment's answer: a reward of the turn, and messages.
            step = await self._await_answer(env.step(action), f"{name}.step")
            self.info = step.info
            if step.reward is None:
                self.scored = False
            elif not math.isfinite(step.reward):
                raise ValueError(f"an environment's reward must be finite or None (unscored), got {step.reward}")
            else:
                turn = branch.turns[-1]
                branch.turns[-1] = turn._replace(reward=turn.reward + step.reward)

            self.messages += step.messages
            if step.done:
                return "terminated" if step.terminated else "truncated"

            # The next turn continues this branch, unless the conversation was rewritten.
            self.context = [*([] if step.rewritten else self.context), *step.messages]
            if step.rewritten or self.dialogue.rewrites(branch.tokens, self.context, tools):
                branch = Branch(self.dialogue.initial(self.context, tools))
                self.branches.append(branch)
            else:
                branch.observe(self.dialogue.extend(branch.tokens, step.messages, tools))

        return "max_turns"

    async def _await_answer(self, call: Awaitable[Step], method: str) -> Step:
        """Return the environment's answer to a call; InfrastructureError if there is none in time."""
        try:
            async with asyncio.timeout(self.step_timeout) as limit:
                return await call
        except TimeoutError:
            if not limit.expired():  # the environment itself has raised it
                raise
            raise InfrastructureError(f"{method} gave no answer within {self.step_timeout:g} s") from None

    def episode(self) -> Episode:
        """Return the last branch as an episode, with the earlier ones in its `branches`.

        The reward of a branch is the sum of all rewards from its beginning to the end of the episode.
        """
        scored = self.scored and self.stop != "infrastructure"
        remaining_reward = sum(branch.reward for branch in self.branches)

        info: dict[str, Any] = {
            "stop": self.stop,
            "turns": sum(len(branch.turns) for branch in self.branches),
            "messages": self.messages,
            "calls": self.calls,
            "unread_calls": self.unread_calls,
            "attempts": self.attempts,
            **({"error": self.error} if self.error else {}),
            **({"environment": dict(self.info)} if self.info else {}),
        }
        text = "\n".join(f"[{message['role']}] {message['content']}" for message in self.messages[1:])

        # A branch without a turn has no token to train, and is omitted; but an episode needs at least one branch.
        branches_with_turns = [branch for branch in self.branches if branch.turns]
        episodes: list[Episode] = []
        for branch in branches_with_turns or self.branches[-1:]:
            reward = remaining_reward if scored and branch.turns else None
            episodes.append(branch.episode(reward, text=text, info=dict(info)))
            remaining_reward -= branch.reward

        *earlier, last = episodes
        last.branches = tuple(earlier)
        return last


class MultiTurnEnv(GroupEnv):
    """Environment for groups of multi-turn episodes, each played in a separate environment.

    Args:
        environment: makes an environment.
        dialogue: converts between messages and tokens.
        limits: keyword arguments of `rollout`, such as max_turns and max_tokens.
    """

    def __init__(self, environment: Callable[[], Environment], dialogue: Dialogue, **limits: Any) -> None:
        super().__init__()
        self.environment, self.dialogue, self.limits = environment, dialogue, limits

    async def play(
        self, policy: PolicyService, sample: Sample, n: int, seed: int, *, evaluation: bool, **sampling: Any
    ) -> list[Episode]:
        """Play n episodes of a task concurrently, and return them; an evaluation records no metrics."""
        options = {"dialogue": self.dialogue, "seed": seed, **self.limits, **sampling}
        task = sample._replace(prompt=sample.prompt.task)
        plays = (rollout(policy, self.environment(), task, sample=number, **options) for number in range(n))
        episodes = await asyncio.gather(*plays)
        for episode in episodes:
            outcome = episode.outcome
            episode.info["correct"] = None if outcome is None else outcome >= 1.0
            if not evaluation:
                record_metric("episode/infrastructure", episode.info["stop"] == "infrastructure")
        return episodes
