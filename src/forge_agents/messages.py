"""Requests to a model and its answers, in no client's dialect.

A dialect (`forge_agents.dialects`) reads a request of its kind into a `ModelRequest`, and writes the `ModelTurn` that
answers it. All between is of this one form.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

# {"role": "system" | "user" | "assistant" | "tool", "content": text}. An assistant's may have "thought", its text, and
# "calls", a list of `Call`; a tool's has "call_id" and "name".
Message = dict[str, Any]
Schema = Mapping[str, Any]  # of a tool, in OpenAI's format: {"type": "function", "function": {"name", "parameters"}}
Finish = Literal["stop", "length", "tool_calls"]

MAX_SAMPLES = 16  # answers of one request


class BadRequest(ValueError):
    """A request that is invalid or unsupported.

    Attributes:
        field: the field at fault.
        status: of HTTP.
        code: the dialect's name of the error, where clients act on it.
        details: additional fields of the error, which a client of Anthropic can act on.
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

    messages: a system message, if any, is the first. With `previous` they are the new ones only.
    tools: what the model may call.
    tool_choice: "auto", "none", "required", or the name of the one tool to call after "function:".
    samples: how many answers.
    max_tokens: of an answer; None: as many as are left.
    stop: strings before which the text of an answer ends.
    schema: the JSON schema that the text of the answer must keep; None: any text.
    previous: the id of the turn that this continues, of clients that send it instead of the history.
    logprobs: the number of most probable tokens to name alongside each; None: no log-probabilities at all.
    overridden: settings of sampling that the client asked for, and the run decides.
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
    """A sampled token as text, its log-probability, and the most probable ones at its place."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """An answer of the model. `cached_tokens` counts context tokens that an earlier turn had already."""

    id: str
    content: str = ""
    thought: str = ""
    calls: tuple[Call, ...] = ()
    finish: Finish = "stop"
    stop: str | None = None  # the stop string that ended it
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer while it is generated: text of the thought or of the content, or a whole call. Of one answer
    the thought comes first, then the content, then the calls."""

    sample: int
    thought: str = ""
    content: str = ""
    call: Call | None = None
