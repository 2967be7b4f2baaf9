"""OpenAI's Chat Completions API, which most agents use.

OpenAI has no field for thoughts: they are in `reasoning_content`, as in other servers of open models.
"""

import time
from collections.abc import Mapping, Sequence

from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import (
    Choice as ChunkChoice,
    ChoiceDelta,
    ChoiceDeltaToolCall,
    ChoiceDeltaToolCallFunction,
    ChoiceLogprobs as ChunkLogprobs,
)
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_usage import CompletionTokensDetails, PromptTokensDetails

from ..messages import MAX_SAMPLES, BadRequest, Call, Delta, Message, ModelRequest, ModelTurn, Schema
from . import Dialect, EventWriter, fields
from .fields import Json

SAMPLING = ("temperature", "top_p", "top_k", "seed", "reasoning", "reasoning_effort", "thinking", "verbosity")
KNOWN = {
    *SAMPLING,
    *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "n", "max_tokens", "max_completion_tokens"),
    *("stop", "response_format", "stream", "stream_options", "logprobs", "top_logprobs"),
}
IGNORED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "moderation", "usage"),
}
NEUTRAL: Mapping[str, Sequence[Json]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "chat_template_kwargs": ({},),
}
PARTS = {"text": "text", "refusal": "refusal"}


class ChatEvents(EventWriter):
    """Writer of the samples of one chat request as chunks, which all have the first sample's id."""

    def __init__(self, request: ModelRequest, ids: Sequence[str]) -> None:
        super().__init__(request, ids)
        self._created = int(time.time())
        self._calls = [0] * len(ids)  # for each sample, the number of calls that were sent

    def begin(self, prompt_tokens: int) -> bytes:
        """Return one chunk for each sample, with the role of its message."""
        # The content is "", not null: programs append the texts of later chunks to it.
        role = ChoiceDelta(role="assistant", content="")
        return b"".join(self._write_delta(index, role) for index in range(len(self._ids)))

    def delta(self, delta: Delta) -> bytes:
        """Return the chunks for a piece of a sample: one for its thought, one for its content, two for a tool call."""
        chunks = b""
        if delta.thought:
            chunks += self._write_delta(delta.sample, ChoiceDelta.model_validate({"reasoning_content": delta.thought}))
        if delta.content:
            chunks += self._write_delta(delta.sample, ChoiceDelta(content=delta.content))

        if delta.call is not None:
            number = self._calls[delta.sample]
            self._calls[delta.sample] += 1
            # As OpenAI's servers do: the id and the name come first, then the arguments without them.
            name = ChoiceDeltaToolCallFunction(name=delta.call.name, arguments="")
            head = ChoiceDeltaToolCall(index=number, id=delta.call.id, type="function", function=name)
            arguments = ChoiceDeltaToolCallFunction(arguments=delta.call.arguments)
            for call in (head, ChoiceDeltaToolCall(index=number, function=arguments)):
                chunks += self._write_delta(delta.sample, ChoiceDelta(tool_calls=[call]))

        return chunks

    def end(self, turns: Sequence[ModelTurn]) -> bytes:
        """Return a chunk with each sample's finish reason and log-probabilities, then the usage if it was requested."""
        chunks = b"".join(self._write_chunk([self._last_choice(index, turn)]) for index, turn in enumerate(turns))
        if self._request.stream_usage:
            chunks += self._write_chunk([], usage_of(turns))
        return chunks + b"data: [DONE]\n\n"

    def _last_choice(self, index: int, turn: ModelTurn) -> Json:
        # All log-probabilities are in the last chunk: the pieces of text before it need not be whole tokens.
        logprobs = ChunkLogprobs(content=_token_logprobs(turn)) if self._request.logprobs is not None else None
        return ChunkChoice(index=index, delta=ChoiceDelta(), finish_reason=turn.finish, logprobs=logprobs)

    def _write_delta(self, sample: int, delta: ChoiceDelta) -> bytes:
        return self._write_chunk([ChunkChoice(index=sample, delta=delta, finish_reason=None)])

    def _write_chunk(self, choices: list[ChunkChoice], usage: CompletionUsage | None = None) -> bytes:
        chunk = ChatCompletionChunk(
            id=self._ids[0],
            object="chat.completion.chunk",
            created=self._created,
            model=self._request.model,
            choices=choices,
            usage=usage,
        )
        return fields.server_sent(chunk.model_dump(exclude_unset=True))


class ChatDialect(Dialect):
    """Requests to `/v1/chat/completions`."""

    writer = ChatEvents
    id_prefix = "chatcmpl-"

    def read(self, body: Json) -> ModelRequest:
        """Parse the JSON body of a request; a BadRequest names the field that is invalid or unsupported."""
        fields.check_fields(body, KNOWN, IGNORED, NEUTRAL)
        tools = tuple(_read_tool(tool, path) for path, tool in fields.read_objects(body.get("tools"), "tools"))
        messages = [
            _read_message(message, path) for path, message in fields.read_objects(body.get("messages"), "messages")
        ]
        options = fields.read_object(body.get("stream_options"), "stream_options")
        top = fields.read_integer(body, "top_logprobs", 0, fields.MAX_TOP_LOGPROBS)
        has_logprobs = fields.read_boolean(body, "logprobs")
        if top and not has_logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")

        return ModelRequest(
            body["model"],
            fields.arrange_conversation(messages, "messages"),
            tools,
            fields.openai_choice(body.get("tool_choice"), tools),
            fields.read_boolean(body, "parallel_tool_calls", True),
            samples=fields.read_integer(body, "n", 1, MAX_SAMPLES) or 1,
            # Where a client sends both names of this limit, the newer one.
            max_tokens=fields.read_integer(body, "max_completion_tokens") or fields.read_integer(body, "max_tokens"),
            stop=fields.stop_strings(body, "stop"),
            schema=fields.answer_schema(body.get("response_format"), "response_format"),
            stream=fields.read_boolean(body, "stream"),
            stream_usage=fields.read_boolean(options, "include_usage"),
            logprobs=(top or 0) if has_logprobs else None,
            overridden=fields.overridden_settings(body, SAMPLING),
        )

    def complete(self, request: ModelRequest, turns: Sequence[ModelTurn]) -> Mapping[str, Json]:
        """Return the JSON body of an answer that is not streamed."""
        choices = [
            Choice(
                index=index,
                message=_answer_message(turn),
                finish_reason=turn.finish,
                logprobs=ChoiceLogprobs(content=_token_logprobs(turn)) if request.logprobs is not None else None,
            )
            for index, turn in enumerate(turns)
        ]
        completion = ChatCompletion(
            id=turns[0].id,
            object="chat.completion",
            created=int(time.time()),
            model=request.model,
            choices=choices,
            usage=usage_of(turns),
        )

        return completion.model_dump(exclude_unset=True)


def _read_message(message: Mapping[str, Json], path: str) -> Message:
    """Read a message of a conversation. Fields that client libraries add to answers, such as ids, are ignored."""
    role = message.get("role")
    # Content that is neither text nor tool calls: an error is better than to drop it silently.
    for name in ("audio", "function_call"):
        if message.get(name) is not None:
            raise BadRequest(f"{path}.{name} is not supported", path)

    joint = "" if role == "assistant" else "\n"
    content = fields.text_of(message.get("content"), f"{path}.content", PARTS, joint)
    if role == "assistant":
        thoughts = (message.get("reasoning_content"), message.get("reasoning"))
        thought = next((text for text in thoughts if isinstance(text, str) and text), "")
        # OpenAI has a separate field for the text with which the assistant declines.
        if not content and isinstance(message.get("refusal"), str):
            content = message["refusal"]
        return fields.assistant_message(
            thought,
            content,
            [_read_call(*entry) for entry in fields.read_objects(message.get("tool_calls"), f"{path}.tool_calls")],
        )

    if role == "tool":
        return {
            "role": "tool",
            "content": content,
            "call_id": fields.read_string(message, "tool_call_id", path),
            "name": str(message.get("name") or ""),
        }
    if role not in ("system", "developer", "user"):
        raise BadRequest(f"{path}.role {fields.shorten_value(role)} must be system, user, assistant or tool", path)
    if message.get("content") is None:
        raise BadRequest(f"{path}.content must be a text", path)

    return {"role": "user" if role == "user" else "system", "content": content}


def _read_call(path: str, call: Mapping[str, Json]) -> Call:
    if call.get("type") not in (None, "function"):
        raise BadRequest(f"{path}: a call of type {fields.shorten_value(call['type'])} is not supported", path)
    function = fields.read_object(call.get("function"), f"{path}.function")
    arguments = fields.arguments_of(function.get("arguments"), f"{path}.function.arguments")
    return Call(
        fields.read_string(call, "id", path), fields.read_string(function, "name", f"{path}.function"), arguments
    )


def _read_tool(tool: Mapping[str, Json], path: str) -> Schema:
    if tool.get("type") != "function":
        raise BadRequest(f"{path}: a tool of type {fields.shorten_value(tool.get('type'))} is not supported", "tools")
    function = fields.read_object(tool.get("function"), f"{path}.function")
    return fields.tool_schema(
        fields.read_string(function, "name", f"{path}.function"),
        function.get("description"),
        function.get("parameters"),
        f"{path}.function",
    )


def _answer_message(turn: ModelTurn) -> ChatCompletionMessage:
    # Like OpenAI's servers, null instead of an empty text where there are calls.
    empty_content = None if turn.calls else ""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in turn.calls
    ]
    return ChatCompletionMessage.model_validate(
        {
            **{"role": "assistant", "content": turn.content or empty_content},
            # The openai package's type has no field for a thought, but keeps fields that it does not know.
            **({"reasoning_content": turn.thought} if turn.thought else {}),
            **({"tool_calls": calls} if calls else {}),
        }
    )


def _token_logprobs(turn: ModelTurn) -> list[ChatCompletionTokenLogprob]:
    return [
        ChatCompletionTokenLogprob(
            token=token.text,
            logprob=token.logprob,
            bytes=_read_bytes(token.text),
            top_logprobs=[TopLogprob(token=text, logprob=value, bytes=_read_bytes(text)) for text, value in token.top],
        )
        for token in turn.logprobs
    ]


def _read_bytes(text: str) -> list[int]:
    r"""Return the bytes of a token from its text; that of a part of a character names them (`spell_token`).

    >>> _read_bytes("a"), _read_bytes(r"bytes:\xf0\x9f")
    ([97], [240, 159])
    """
    named = text.removeprefix("bytes:\\x")
    return list(text.encode() if named == text else bytes.fromhex(named.replace("\\x", "")))


def usage_of(turns: Sequence[ModelTurn]) -> CompletionUsage:
    """Return the token counts of one request.

    Args:
        turns: its samples, which have the same prompt: it is counted once.
    """
    prompt = turns[0].prompt_tokens
    completion = sum(turn.completion_tokens for turn in turns)
    thought = sum(turn.thought_tokens for turn in turns)
    return CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=turns[0].cached_tokens),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=thought),
    )
