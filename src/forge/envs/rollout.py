"""One episode: the policy and an environment take turns until one of them, or a limit, ends it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from random import Random
from typing import Any, Protocol

from ..types import Completion, Episode
from .dialogue import Dialogue
from .environment import Environment, InfrastructureError, Message, Step
from .transcript import Transcript

log = logging.getLogger(__name__)
_CLOSING = 10.0  # seconds for an environment to let go


class Policy(Protocol):
    """A service of generators, or whatever has an endpoint of this form."""

    @property
    def generate(self) -> Any:
        """`await generate.route(token_ids, max_tokens=, stop_token_ids=, seed=, **sampling) -> Completion`"""


async def rollout(
    policy: Policy,
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

    Its tokens are those that the policy was given and that it sampled, one array that only grows; a conversation
    that the environment rewrites begins a new branch (`Episode.branches` has the earlier ones). `info["stop"]` says
    why it ended: "terminated" or "truncated" by the environment, "max_turns", "max_tokens", "infrastructure", and
    `info["messages"]` what was said, `info["environment"]` what its last step told of itself. What an environment
    gave counts, whatever ended the episode; one that lost its infrastructure, or that the environment could not
    score, has no reward.

    Args:
        seed: of the environment, and with `sample`, the number of this episode among those of the task, of what the
            policy draws.
        max_tokens: of the whole episode, or of each branch, the first prompt included.
        max_turn_tokens: of one turn; None is what is left.
        step_timeout: seconds for each of the environment's answers.
        retries: how often an episode is played anew after an `InfrastructureError`.
        sampling: fields of `forge.types.Sampling` that differ from the policy's defaults.

    Raises:
        ValueError: a limit that cannot be. Whatever else the environment, or the policy, raises.
    """
    if max_turns < 1 or max_tokens < 1 or (max_turn_tokens or 1) < 1 or step_timeout <= 0 or retries < 0:
        raise ValueError("max_turns, max_tokens, max_turn_tokens and step_timeout must be above 0, retries at least 0")
    for attempt in range(retries + 1):
        played = _Played(dialogue, max_tokens, step_timeout, Random(f"{seed}/{sample}/{attempt}"))
        try:
            played.stop = await played.play(policy, env, task, seed, max_turns, max_turn_tokens, sampling)
            break
        except InfrastructureError as error:
            played.stop, played.error = "infrastructure", str(error)
        except Exception as error:
            error.add_note(f"while {type(env).__name__} was played on task {str(task)[:80]!r}")
            raise
        finally:
            played.attempts = attempt + 1
            await played.close(env)
    return played.episode()


class _Played:
    """One attempt at an episode."""

    def __init__(self, dialogue: Dialogue, max_tokens: int, step_timeout: float, random: Random) -> None:
        self.dialogue, self.max_tokens, self.step_timeout, self.random = dialogue, max_tokens, step_timeout, random
        self.transcripts = [Transcript()]
        self.messages: list[Message] = []
        self.scored, self.stop, self.error, self.attempts = True, "", "", 0
        self.calls = self.misread = 0
        self.said: Mapping[str, Any] = {}

    async def play(
        self,
        policy: Policy,
        env: Environment,
        task: Any,
        seed: int,
        max_turns: int,
        max_turn_tokens: int | None,
        sampling: dict[str, Any],
    ) -> str:
        """Why it ended. InfrastructureError: it was lost."""
        name = type(env).__name__
        step = await self.answer(env.reset(task, seed=seed), f"{name}.reset")
        if step.done:
            raise ValueError(f"{name}.reset gave an episode that has already ended")
        tools = step.tools
        transcript = self._begin(step)
        for _ in range(max_turns):
            room = self.max_tokens - len(transcript.tokens)
            if room < 1:
                return "max_tokens"
            completion: Completion = await policy.generate.route(
                list(transcript.tokens),
                max_tokens=min(room, max_turn_tokens or room),
                stop_token_ids=self.dialogue.stop_ids,
                seed=self.random.getrandbits(48),
                **sampling,
            )
            transcript.sampled(completion)
            action = self.dialogue.read(completion.token_ids, tools, truncated=completion.finish == "length")
            self.calls += len(action.calls)
            self.misread += len(action.errors)
            self.messages.append({"role": "assistant", "content": action.text})
            step = await self.answer(env.step(action), f"{name}.step")
            self.said = step.info
            self._reward(step)
            self.messages += step.messages
            if step.done:
                return "terminated" if step.terminated else "truncated"
            if step.rewritten:
                self.transcripts.append(Transcript())
                transcript = self._begin(step, tools)
            else:
                transcript.observe(self.dialogue.extend(transcript.tokens, step.messages, tools))
        return "max_turns"

    def _begin(self, step: Step, tools: Any = None) -> Transcript:
        transcript = self.transcripts[-1]
        if tools is None:
            self.messages += step.messages
        transcript.observe(self.dialogue.initial(step.messages, step.tools if tools is None else tools))
        return transcript

    def _reward(self, step: Step) -> None:
        if step.reward is None:
            self.scored = False
        else:
            self.transcripts[-1].rewarded(step.reward)

    async def close(self, env: Environment) -> None:
        """The episode is over: what does not end in time, or is lost already, cannot take it back."""
        try:
            async with asyncio.timeout(min(self.step_timeout, _CLOSING)):
                await env.close()
        except (InfrastructureError, TimeoutError) as error:
            log.warning("%s.close: %s", type(env).__name__, str(error) or f"no answer within {_CLOSING:g} s")

    async def answer(self, asked: Awaitable[Any], what: str) -> Any:
        """What the environment says. InfrastructureError: it said nothing in time."""
        try:
            async with asyncio.timeout(self.step_timeout) as limit:
                return await asked
        except TimeoutError:
            if not limit.expired():
                raise
            raise InfrastructureError(f"{what} gave no answer within {self.step_timeout:g} s") from None

    def episode(self) -> Episode:
        """The last branch with the earlier ones; each has the reward that was still to come when it began."""
        whole = self.scored and self.stop != "infrastructure"
        branches: list[Episode] = []
        to_come = sum(transcript.reward for transcript in self.transcripts)
        turns = sum(len(transcript.turns) for transcript in self.transcripts)
        for transcript in [t for t in self.transcripts if t.turns] or self.transcripts[-1:]:
            info: dict[str, Any] = {"stop": self.stop, "turns": turns, "messages": self.messages}
            info |= {"calls": self.calls, "unread_calls": self.misread, "attempts": self.attempts}
            info |= {"error": self.error} if self.error else {}
            info |= {"environment": dict(self.said)} if self.said else {}
            text = "\n".join(f"[{m['role']}] {m['content']}" for m in self.messages[1:])
            branches.append(transcript.episode(to_come if whole and transcript.turns else None, text=text, info=info))
            to_come -= transcript.reward
        *earlier, last = branches
        last.branches = tuple(earlier)
        return last
