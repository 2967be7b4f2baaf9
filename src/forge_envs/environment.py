"""The environment interface: reset with a task, step with the policy's actions."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forge.data.thoughts import without_thoughts

from .schemas import Arguments, Schema

Message = dict[str, Any]  # {"role": "system" | "user" | "tool", "content": text}; a tool's answer also has its "name"


class InfrastructureError(Exception):
    """A connection, server or sandbox of the environment failed, which is not the policy's fault. The episode is
    retried from the start, and unscored if retries fail."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the policy."""

    name: str
    arguments: Arguments
    id: str = ""


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the policy: the whole `text`, the `content` without tool calls, the calls, and the `errors` of
    malformed ones. `truncated`: it ran out of tokens before the turn ended."""

    text: str
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()
    truncated: bool = False

    @property
    def answer(self) -> str:
        """Return the text of the turn after its thoughts, without tool calls; the calls as text if it says nothing
        else."""
        return without_thoughts(self.content) or without_thoughts(self.text)


def user_message(text: str) -> Message:
    """Return a message of the user."""
    return {"role": "user", "content": text}


CUT = "error: the turn was cut at its limit of tokens before it ended, so it was not played"


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's answer.

    `reward` is for the action that led here; None leaves the whole episode unscored, which differs from 0.
    `terminated`: the task reached its own end; `truncated`: something else ended it, such as a limit. Rewards so far
    count in both cases. `tools` are schemas in OpenAI's format, of which only those at reset count. With `rewritten`,
    `messages` replace the whole conversation, and a new branch of the episode starts.
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
        """Return whether the episode ends with this step."""
        return self.terminated or self.truncated


class Environment(ABC):
    """One episode at a time: `reset`, `step` until a step is done, `close`; then possibly `reset` again.

    An exception ends the episode: after an `InfrastructureError` it is retried, all others propagate.
    """

    @abstractmethod
    async def reset(self, task: Any, *, seed: int) -> Step:
        """Start an episode on this task; all randomness comes from the seed."""

    @abstractmethod
    async def step(self, action: Action) -> Step:
        """Apply an action."""

    async def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Free all resources. It may be called at any time, and twice."""
