"""What an environment is: it is reset with a task, takes what the policy says, and answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]  # {"role": "system" | "user" | "tool", "content": text}; a tool's answer also has its "name"


class InfrastructureError(Exception):
    """What an environment stands on has failed: a connection, a server, a sandbox. Not the policy's doing and not its
    failure: the episode is played again from the start, and if that does not help either it stays unscored."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy asks for, read from what it wrote."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Action:
    """What the policy said in one turn.

    `text` is all of it, `content` what is left without its tool calls, `errors` what is wrong with calls that could not
    be read. `truncated` says that it ran out of tokens before it had ended its turn.
    """

    text: str
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment answers.

    `reward` is for the action that led here; None says that it could not be scored, and the episode stays unscored
    (never read as 0). `terminated` says that the task has come to its own end, `truncated` that
    something else ended it, such as a limit: the rewards so far count in both cases. `tools` are the schemas of what
    may be called, as OpenAI writes them, and count at reset alone. With `rewritten`, `messages` is the whole
    conversation anew, in place of what was said before: what follows is a new branch of the episode.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = 0.0
    terminated: bool = False
    truncated: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    rewritten: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class Environment(ABC):
    """One episode at a time: `reset`, `step` until a step is done, `close`; then `reset` again or never more.

    Whatever a method raises ends the episode: `InfrastructureError` and its kin mean that it may be played again,
    anything else is a mistake in the environment and reaches whoever runs it.
    """

    @abstractmethod
    async def reset(self, task: Any, *, seed: int) -> Step:
        """Begin an episode on this task; all of its randomness comes from the seed."""

    @abstractmethod
    async def step(self, action: Action) -> Step:
        """Take an action, and answer."""

    async def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Let go of everything that is held. It may be called at any time, and twice."""
