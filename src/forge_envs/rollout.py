"""Roll out episodes: policy and environment take turns until one of them, or a limit, ends it."""

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
_CLOSING = 10.0  # seconds for an environment to close


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
    """Play an episode of `env` on `task`.

    The episode's tokens are those that the policy was given and sampled, in one array that only grows; a conversation
    that the environment rewrites, or the chat template with `thoughts="template"`, starts a new branch
    (`Episode.branches` has the earlier ones). `info` has "stop", why
    it ended ("terminated" or "truncated" by the environment, "max_turns", "max_tokens", "infrastructure"), "messages",
    and "environment", the info of its last step. The reward is the sum of the steps', however the episode ended; None
    if the environment failed or could not score a step.

    Args:
        seed: of the environment; with `sample`, the number of this episode of the task, of the policy.
        max_tokens: of the whole episode, or of each branch, the first prompt included.
        max_turn_tokens: of one turn; None: as many as are left.
        step_timeout: seconds for each answer of the environment.
        retries: how often an episode is played again after an `InfrastructureError`.
        sampling: fields of `forge.types.Sampling` that differ from the policy's defaults.

    Raises:
        Exceptions of the environment other than `InfrastructureError`, and those of the policy.
    """
    for attempt in range(retries + 1):
        played = _Played(dialogue, max_tokens, step_timeout, turn_seeds(seed, sample, attempt))
        try:
            # One replica gets all turns: it has the keys and values of the earlier ones.
            async with policy.session() if hasattr(policy, "session") else nullcontext():
                played.stop = await played.play(policy, env, task, seed, max_turns, max_turn_tokens, sampling)
            break
        except InfrastructureError as error:
            played.stop, played.error = "infrastructure", str(error)
        except Exception as error:
            turns = [message["content"] for message in played.messages if message["role"] == "assistant"]
            last = f", after the turn {turns[-1]!r:.300}" if turns else ""
            error.add_note(f"while {type(env).__name__} was played on task {str(task)[:300]!r}{last}")
            raise
        finally:
            played.attempts = attempt + 1
            try:  # a failed close does not invalidate the episode
                async with asyncio.timeout(min(step_timeout, _CLOSING)):
                    await env.close()
            except (InfrastructureError, TimeoutError) as error:
                log.warning("%s.close: %s", type(env).__name__, str(error) or f"no answer within {_CLOSING:g} s")

    return played.episode()


class _Branch:
    """An append-only token sequence with mask, logprob and version of each token."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.mask: list[bool] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.turns: list[Turn] = []
        self.origins: set[Origin] = set()
        self.experts: np.ndarray | None = None
        self.observe(prompt)

    def observe(self, tokens: Sequence[int]) -> None:
        """Append tokens of the environment."""
        self.tokens += tokens
        self.mask += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)

    def sampled(self, completion: Completion) -> None:
        """Append a turn of the policy. ValueError: it was not sampled as a continuation of these tokens."""
        if list(completion.prompt_ids) != self.tokens:
            raise ValueError(f"a turn continues {len(completion.prompt_ids)} tokens that are not the episode's")

        # The turn's tokens, with the version that drew each.
        start, ids = len(self.tokens), completion.token_ids
        self.tokens += ids
        self.mask += [True] * len(ids)
        self.logprobs += completion.logprobs
        self.versions += completion.versions
        self.turns.append(Turn(start, len(self.tokens), completion.version, completion.finish))

        if completion.experts is not None:
            experts = completion.experts.copy()
            if self.experts is not None:  # all but its last token's, which is known only now
                experts[: len(self.experts) - 1] = self.experts[:-1]
            self.experts = experts

        identities = completion.identities
        self.origins |= {Origin(v, identities.get(v, ""), completion.sampled_by) for v in {*completion.versions}}

    @property
    def reward(self) -> float:
        return sum(turn.reward for turn in self.turns)


def turn_seeds(seed: int, sample: int, attempt: int) -> Iterator[int]:
    """Yield seeds of the policy's turns in one attempt at an episode, without end."""
    random = Random(f"{seed}/{sample}/{attempt}")
    while True:
        yield random.getrandbits(48)


class _Played:
    """One attempt at an episode."""

    def __init__(self, dialogue: Dialogue, max_tokens: int, step_timeout: float, seeds: Iterator[int]) -> None:
        self.dialogue, self.max_tokens, self.step_timeout, self.seeds = dialogue, max_tokens, step_timeout, seeds
        self.branches = [_Branch([])]
        self.messages: list[Message] = []
        self.context: list[Message] = []  # those that the policy reads: from the last rewriting on
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
        """Return why it ended.

        Raises:
            InfrastructureError: the environment failed or timed out.
            ValueError: the environment ended at reset, or gave a reward that is not finite.
        """
        # The first context comes from the environment.
        name = type(env).__name__
        step = await self._await_answer(env.reset(task, seed=seed), f"{name}.reset")
        if step.done:
            raise ValueError(f"{name}.reset gave an episode that has already ended")
        tools = step.tools
        self.messages += step.messages
        self.context += step.messages

        branch = self.branches[0] = _Branch(self.dialogue.initial(step.messages, tools))
        for _ in range(max_turns):
            room = self.max_tokens - len(branch.tokens)
            if room < 1:
                return "max_tokens"

            # One turn: the policy continues the branch, up to the limits of the turn and of the branch.
            completion: Completion = await policy.generate.route(
                list(branch.tokens),
                max_tokens=min(room, max_turn_tokens or room),
                stop_token_ids=self.dialogue.stop_ids,
                seed=next(self.seeds),
                **sampling,
            )
            branch.sampled(completion)
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
                raise ValueError(f"an environment gave the reward {step.reward}: use None for what could not be scored")
            else:
                last = branch.turns[-1]
                branch.turns[-1] = last._replace(reward=last.reward + step.reward)

            self.messages += step.messages
            if step.done:
                return "terminated" if step.terminated else "truncated"

            # The next turn continues this branch, unless the conversation was rewritten.
            self.context = [*([] if step.rewritten else self.context), *step.messages]
            if step.rewritten or self.dialogue.rewrites(branch.tokens, self.context, tools):
                branch = _Branch(self.dialogue.initial(self.context, tools))
                self.branches.append(branch)
            else:
                branch.observe(self.dialogue.extend(branch.tokens, step.messages, tools))

        return "max_turns"

    async def _await_answer(self, call: Awaitable[Step], method: str) -> Step:
        """Return the environment's answer. InfrastructureError: there was none in time."""
        try:
            async with asyncio.timeout(self.step_timeout) as limit:
                return await call
        except TimeoutError:
            if not limit.expired():
                raise
            raise InfrastructureError(f"{method} gave no answer within {self.step_timeout:g} s") from None

    def episode(self) -> Episode:
        """Return the last branch, with the earlier ones. The reward of a branch is the sum from its beginning on."""
        scored = self.scored and self.stop != "infrastructure"
        remaining_reward = sum(branch.reward for branch in self.branches)

        # What a log or a metric needs to know of the attempt.
        info: dict[str, Any] = {"stop": self.stop, "turns": sum(len(branch.turns) for branch in self.branches)}
        info |= {"messages": self.messages, "calls": self.calls, "unread_calls": self.unread_calls}
        info |= {"attempts": self.attempts}
        info |= {"error": self.error} if self.error else {}
        info |= {"environment": dict(self.info)} if self.info else {}
        text = "\n".join(f"[{m['role']}] {m['content']}" for m in self.messages[1:])

        # Branches without a turn have nothing to learn from; of an episode without turns the last one stays.
        episodes: list[Episode] = []
        for branch in [b for b in self.branches if b.turns] or self.branches[-1:]:
            end = branch.turns[-1].end if branch.turns else len(branch.tokens)  # nothing is trained after it
            episodes.append(
                Episode.played(
                    branch.tokens[:end],
                    branch.mask[:end],
                    branch.logprobs[:end],
                    branch.versions[:end],
                    turns=branch.turns,
                    reward=remaining_reward if scored and branch.turns else None,
                    origins=branch.origins,
                    text=text,
                    info=dict(info),
                    experts=branch.experts,
                )
            )
            remaining_reward -= branch.reward

        *earlier, last = episodes
        last.branches = tuple(earlier)
        return last


class MultiTurnEnv(GroupEnv):
    """Environments of several turns, one for each episode.

    Args:
        environment: makes an environment.
        dialogue: converts between messages and tokens.
        limits: of `forge_envs.rollout`: max_turns, max_tokens and so on.
    """

    def __init__(self, environment: Callable[[], Environment], dialogue: Dialogue, **limits: Any) -> None:
        super().__init__()
        self.environment, self.dialogue, self.limits = environment, dialogue, limits

    async def play(
        self, policy: PolicyService, sample: Sample, n: int, seed: int, *, evaluation: bool, **sampling: Any
    ) -> list[Episode]:
        """Play n episodes concurrently, each in a separate environment."""
        options = {"dialogue": self.dialogue, "seed": seed, **self.limits, **sampling}
        plays = (rollout(policy, self.environment(), sample, sample=number, **options) for number in range(n))
        episodes = await asyncio.gather(*plays)
        for episode in episodes:
            outcome = episode.outcome
            episode.info["correct"] = None if outcome is None else outcome >= 1.0
            if not evaluation:
                record_metric("episode/infrastructure", episode.info["stop"] == "infrastructure")
        return episodes
