"""The dialects of clients: OpenAI's Chat Completions and Responses, and Anthropic's Messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..messages import BadRequest, Delta, ModelRequest, ModelTurn


class EventWriter(Protocol):
    """Writes one answer as server-sent events. Every method returns the bytes to send, "" if there are none."""

    def begin(self, prompt_tokens: int) -> bytes:
        """The events before the first token."""

    def delta(self, delta: Delta) -> bytes:
        """The events of a piece of the answer."""

    def end(self, turns: Sequence[ModelTurn]) -> bytes:
        """The events after the last piece: how each sample ended, and usage."""

    def ping(self) -> bytes:
        """An event or comment without content, while the client waits."""

    def failure(self, error: BadRequest) -> bytes:
        """The event of an error after the first event was sent."""


class Dialect(Protocol):
    """One kind of request."""

    name: str
    id_prefix: str  # of a turn's id
    call_prefix: str  # of a call's id

    def read(self, body: Any) -> ModelRequest:
        """Parse a body. BadRequest: names the unsupported field."""

    def complete(self, request: ModelRequest, turns: Sequence[ModelTurn]) -> Mapping[str, Any]:
        """The body of an answer that is not streamed."""

    def events(self, request: ModelRequest, ids: Sequence[str]) -> EventWriter:
        """The writer of a streamed answer whose samples have these ids."""

    def error(self, error: BadRequest) -> Mapping[str, Any]:
        """The body of an error."""
