"""The environment interface: reset with a task, step with the policy's actions."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forge.data.thoughts import without_thoughts

from .schemas import Arguments, Schema

Message = dict[str, Any]  # {"role": "system" | "user" | "tool", "content": text}; a tool's message also has its "name"


class InfrastructureError(Exception):
    """Error: a connection, server or sandbox of the environment failed, which is not the policy's fault.

    The episode is retried from the start; if all retries fail, it has no reward.
    """


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the policy; `id` distinguishes the calls of one turn."""

    name: str
    arguments: Arguments
    id: str = ""


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the policy.

    text: the whole turn, with its thoughts and calls as they were written.
    content: the text without tool calls.
    calls: the tool calls that could be parsed.
    errors: why others could not be parsed.
    truncated: whether the limit of tokens was reached before the turn ended.
    """

    text: str
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()
    truncated: bool = False

    @property
    def answer(self) -> str:
        """Return the text of the turn without its thoughts and tool calls; with the calls if there is no other text."""
        return without_thoughts(self.content) or without_thoughts(self.text)


def user_message(text: str) -> Message:
    """Return a text as a message of the user.

    >>> user_message("hello")
    {'role': 'user', 'content': 'hello'}
    """
    return {"role": "user", "content": text}


CUT = "error: the turn was cut at its limit of tokens before it ended, so it was not played"


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's answer to an action, or to a reset.

    messages: the observation, which the policy answers next.
    reward: the reward of the action. None: it could not be scored, and the whole episode is left unscored, which is not
        the same as a reward of 0.
    terminated: whether the task has ended.
    truncated: whether something else has ended the episode, such as a limit. The rewards so far count in both cases.
    tools: the tools' schemas in OpenAI's format; only the tools of the reset's step are used.
    rewritten: whether `messages` replace the whole conversation, so that a new branch of the episode starts.
    info: for the record of the episode.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = 0.0
    terminated: bool = False
    truncated: bool = False
    tools: tuple[Schema, ...] = ()
    rewritten: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Return whether the episode ends with this step, in either way."""
        return self.terminated or self.truncated


class Environment(ABC):
    """An environment that plays one episode at a time.

    The calls of an episode are `reset`, then `step` until a step is done, then `close`; `reset` may follow again. An
    exception ends the episode: after an `InfrastructureError` it is retried, other exceptions are raised to the caller.
    """

    @abstractmethod
    async def reset(self, task: Any, *, seed: int) -> Step:
        """Start an episode, and return its first observation.

        Args:
            task: what is to be done, such as a `forge.types.Sample`.
            seed: determines all random numbers of the episode.
        """

    @abstractmethod
    async def step(self, action: Action) -> Step:
        """Apply the policy's action, and return the next observation and the reward."""

    async def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Free all resources. It may be called at any time, and more than once."""
