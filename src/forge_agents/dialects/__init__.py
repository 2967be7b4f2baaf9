"""The dialects of clients: OpenAI's Chat Completions and Responses, and Anthropic's Messages."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ..messages import BadRequest, Call, Delta, ModelRequest, ModelTurn
from .fields import openai_error, server_sent


class EventWriter(ABC):
    """Writer of the response to one streamed request as server-sent events.

    Every public method returns the bytes to send to the client; b"" if the dialect sends nothing at that point.

    Args:
        request: the request that is answered.
        ids: the answer's ids, one for each requested sample.
    """

    def __init__(self, request: ModelRequest, ids: Sequence[str]) -> None:
        self._request = request
        self._ids = ids

    @abstractmethod
    def begin(self, prompt_tokens: int) -> bytes:
        """Return the events that are sent before the first token.

        Args:
            prompt_tokens: the number of tokens of the prompt, for dialects that send usage first.
        """

    @abstractmethod
    def delta(self, delta: Delta) -> bytes:
        """Return the events for one piece of a sample: text of its thought or content, or a whole tool call."""

    @abstractmethod
    def end(self, turns: Sequence[ModelTurn]) -> bytes:
        """Return the events after the last piece: why each sample ended, and the token usage.

        Args:
            turns: the complete samples, in the order of `ids`.
        """

    def ping(self) -> bytes:
        """Return an event or comment without content, which keeps the connection open while no token arrives."""
        return b": ping\n\n"

    def failure(self, error: BadRequest) -> bytes:
        """Return the event that reports an error once the stream has started, when the HTTP status is sent already."""
        return server_sent(openai_error(error))


class ItemWriter(EventWriter):
    """Writer of one response as a sequence of items: thoughts, texts and tool calls.

    At most one item is open, a thought or a text: it is closed before the next item starts. A tool call is written
    whole, and is never open.
    """

    open = ""  # the kind of the open item: "thought" or "content"; "" while no item is open

    def delta(self, delta: Delta) -> bytes:
        """Return the events for a piece of the answer, including those that close one item and start the next."""
        events = b""
        for kind, text in (("thought", delta.thought), ("content", delta.content)):
            if not text:
                continue
            if self.open != kind:
                events += self.close()
                self.open = kind
                events += self.begin_item(kind)
            events += self.piece(kind, text)

        if delta.call is not None:
            events += self.close() + self.call(delta.call)
        return events

    @abstractmethod
    def begin_item(self, kind: str) -> bytes:
        """Return the events that start an empty item of a kind, "thought" or "content"."""

    @abstractmethod
    def piece(self, kind: str, text: str) -> bytes:
        """Return the event that appends a text to the open item."""

    @abstractmethod
    def close(self) -> bytes:
        """Return the events that complete the open item; b"" if no item is open."""

    @abstractmethod
    def call(self, call: Call) -> bytes:
        """Return the events of a complete tool call."""


class Dialect(ABC):
    """One client API: parses its requests, and formats the answers and errors that its clients expect."""

    writer: type[EventWriter]  # writes streamed answers
    id_prefix: str  # with which the id of an answer starts
    call_prefix: str = "call_"  # with which the id of a tool call starts

    @abstractmethod
    def read(self, body: Any) -> ModelRequest:
        """Parse the JSON body of a request.

        Raises:
            BadRequest: a field is invalid or unsupported; the error names it.
        """

    @abstractmethod
    def complete(self, request: ModelRequest, turns: Sequence[ModelTurn]) -> Mapping[str, Any]:
        """Return the JSON body of an answer that is not streamed.

        Args:
            turns: the samples of the answer, at least one.
        """

    def error(self, error: BadRequest) -> Mapping[str, Any]:
        """Return the JSON body of an error."""
        return openai_error(error)
