"""Requests to a model and its answers, in one form for all client APIs.

A dialect (`forge_agents.dialects`) parses a client's request into a `ModelRequest`, and formats the `ModelTurn` that
answers it. All code between them uses only the classes of this module.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

# {"role": "system" | "user" | "assistant" | "tool", "content": text}. A message of the assistant may also have
# "thought", a text, and "calls", a list of `Call`; a message of a tool has "call_id" and "name".
Message = dict[str, Any]
Schema = Mapping[str, Any]  # of a tool, in OpenAI's format: {"type": "function", "function": {"name", "parameters"}}
Finish = Literal["stop", "length", "tool_calls"]

MAX_SAMPLES = 16  # that one request may ask for


class BadRequest(ValueError):
    """A request that is invalid or unsupported.

    Attributes:
        field: the name of the invalid field; None: no single field is at fault.
        status: the HTTP status of the response.
        code: the API's name of the error, for errors that clients handle by name.
        details: additional fields of the error, for clients of Anthropic.
    """

    def __init__(
        self,
        message: str,
        field: str | None = None,
        status: int = 400,
        code: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.field = field
        self.status = status
        self.code = code
        self.details = details


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request for the next turn of a conversation.

    model: the name of the policy that the client asks for.
    messages: the conversation, whose first message may be a system message. With `previous`, only the messages after
        that turn.
    tools: the tools that the model may call.
    tool_choice: "auto", "none", "required", or "function:NAME" for the one tool to call.
    parallel_calls: whether an answer may have several calls.
    samples: the number of answers to sample.
    max_tokens: the limit for each answer; None: as many as the session has left.
    stop: strings at which an answer ends; its text does not include them.
    schema: the JSON schema that the text of the answer must satisfy; None: any text.
    stream: whether the answer is sent while it is sampled.
    stream_usage: whether a stream ends with the token counts.
    previous: the id of the turn to continue, from clients that send it instead of the history; "": none.
    logprobs: for each token, the number of most probable tokens to return; None: return no log-probabilities.
    overridden: sampling settings that the client asked for but that the run's configuration decides.
    prompt: a text or token ids to continue as they are; "": the messages are rendered by the chat template.
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Schema, ...] = ()
    tool_choice: str = "auto"
    parallel_calls: bool = True
    samples: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    schema: Mapping[str, Any] | None = None
    stream: bool = False
    stream_usage: bool = False
    previous: str = ""
    logprobs: int | None = None
    overridden: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | Sequence[int] = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token as text, its log-probability, and the most probable tokens at its position with theirs."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """A complete answer of the model."""

    id: str
    content: str = ""
    thought: str = ""
    calls: tuple[Call, ...] = ()
    finish: Finish = "stop"
    stop: str | None = None  # the stop string that ended it
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt's tokens, those that are in the turn that it continues
    completion_tokens: int = 0
    thought_tokens: int = 0  # of the completion's tokens
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a sample while it is generated: text of its thought or content, or a whole tool call.

    Each sample has all pieces of its thought first, then its content, then its calls.
    """

    sample: int
    thought: str = ""
    content: str = ""
    call: Call | None = None
