"""The dialects of clients: OpenAI's Chat Completions and Responses, and Anthropic's Messages."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ..messages import BadRequest, Call, Delta, ModelRequest, ModelTurn
from .fields import openai_error, server_sent


class EventWriter(ABC):
    """Writes one answer as server-sent events. Every method returns the bytes to send, "" if there are none.

    Args:
        ids: of the samples.
    """

    def __init__(self, request: ModelRequest, ids: Sequence[str]) -> None:
        self._request = request
        self._ids = ids

    @abstractmethod
    def begin(self, prompt_tokens: int) -> bytes:
        """Return the events before the first token."""

    @abstractmethod
    def delta(self, delta: Delta) -> bytes:
        """Return the events of a piece of the answer."""

    @abstractmethod
    def end(self, turns: Sequence[ModelTurn]) -> bytes:
        """Return the events after the last piece: how each sample ended, and usage."""

    def ping(self) -> bytes:
        """Return an event or comment without content, while the client waits."""
        return b": ping\n\n"

    def failure(self, error: BadRequest) -> bytes:
        """Return the event of an error after the first event was sent."""
        return server_sent(openai_error(error))


class ItemWriter(EventWriter):
    """Writes one answer as items, of which at most one is open, a thought or a text: it ends when another starts."""

    open = ""  # "thought", "content", or "" while none is

    def delta(self, delta: Delta) -> bytes:
        """Return a piece of the open item; before it, what ends another and starts this."""
        events = b""
        for kind, text in (("thought", delta.thought), ("content", delta.content)):
            if text and self.open != kind:
                events += self.close()
                self.open = kind
                events += self.begin_item(kind)
            if text:
                events += self.piece(kind, text)
        return events if delta.call is None else events + self.close() + self.call(delta.call)

    @abstractmethod
    def begin_item(self, kind: str) -> bytes:
        """Return the events before its first piece."""

    @abstractmethod
    def piece(self, kind: str, text: str) -> bytes:
        """Return the event of a piece of its text."""

    @abstractmethod
    def close(self) -> bytes:
        """Return the events of its end; none if no item is open."""

    @abstractmethod
    def call(self, call: Call) -> bytes:
        """Return the events of a whole call."""


class Dialect(ABC):
    """One kind of request."""

    writer: type[EventWriter]  # of streamed answers
    id_prefix: str  # of a turn's id
    call_prefix: str = "call_"  # of a call's id

    @abstractmethod
    def read(self, body: Any) -> ModelRequest:
        """Parse a body. BadRequest: names the unsupported field."""

    @abstractmethod
    def complete(self, request: ModelRequest, turns: Sequence[ModelTurn]) -> Mapping[str, Any]:
        """Return the body of an answer that is not streamed."""

    def error(self, error: BadRequest) -> Mapping[str, Any]:
        """Return the body of an error."""
        return openai_error(error)
