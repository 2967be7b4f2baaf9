"""Anthropic's Messages API, which Claude Code uses, and its requests that count the tokens of a prompt."""

import json
from collections.abc import Mapping, Sequence

from anthropic import types as api
from anthropic.types.raw_message_delta_event import Delta as StopDelta
from pydantic import BaseModel

from ..messages import BadRequest, Call, Message, ModelRequest, ModelTurn, Schema
from . import Dialect, ItemWriter, fields
from .fields import Json

SAMPLING = ("temperature", "top_p", "top_k", "thinking")
KNOWN = {
    *SAMPLING,
    *("model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream"),
    *("output_config", "output_format", "thread", "context_management"),
}
IGNORED = {
    *("metadata", "service_tier", "inference_geo", "speed", "cache_control", "diagnostics", "betas", "fallbacks"),
    *("billing_policy", "fallback_credit_token", "user_profile_id", "workspace_id"),
}
NEUTRAL: Mapping[str, Sequence[Json]] = {
    "container": (),
    "mcp_servers": ([],),
    "compaction": ({"type": "disabled"},),
}
TEXT = {"text": "text"}
BILLING = "x-anthropic-billing-header:"  # starts a block that Claude Code sends for Anthropic's accounts only
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Clients decide by the type as much as by the status whether they try again.
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class AnthropicEvents(ItemWriter):
    """Writes one answer as a message of content blocks, one for each item."""

    def __init__(self, request: ModelRequest, ids: Sequence[str]) -> None:
        super().__init__(request, ids)
        self._index = 0  # of the open block; while none is open, of the next block

    def begin(self, prompt_tokens: int) -> bytes:
        """Return the event that starts a message without content.

        Args:
            prompt_tokens: the input tokens of its usage, a preliminary count which the last event replaces.
        """
        message = _start_message(self._request, self._ids[0], api.Usage(input_tokens=prompt_tokens, output_tokens=0))
        return _write_event(api.RawMessageStartEvent(type="message_start", message=message))

    def end(self, turns: Sequence[ModelTurn]) -> bytes:
        """Return the events that end the open block and the message, with its stop reason and usage."""
        usage = api.MessageDeltaUsage.model_validate(_turn_usage(turns[0]).model_dump(exclude_unset=True))
        stopped = api.RawMessageDeltaEvent(type="message_delta", delta=_stop_reason(turns[0]), usage=usage)
        return self.close() + _write_event(stopped) + _write_event(api.RawMessageStopEvent(type="message_stop"))

    def ping(self) -> bytes:
        """Return Anthropic's event without content, which keeps the connection open while no token arrives."""
        return fields.server_sent({"type": "ping"}, "ping")

    def failure(self, error: BadRequest) -> bytes:
        """Return an event with the JSON body of an error."""
        return fields.server_sent(AnthropicDialect().error(error), "error")

    def begin_item(self, kind: str) -> bytes:
        """Return the event that starts an empty block: of text if `kind` is "content", else of thinking."""
        thinking = api.ThinkingBlock(type="thinking", thinking="", signature="")
        return self._begin_block(api.TextBlock(type="text", text="") if kind == "content" else thinking)

    def piece(self, kind: str, text: str) -> bytes:
        """Return the event that appends a text to the open block."""
        thinking = api.ThinkingDelta(type="thinking_delta", thinking=text)
        return self._write_delta(api.TextDelta(type="text_delta", text=text) if kind == "content" else thinking)

    def close(self) -> bytes:
        """Return the events that end the open block, a thought's signature among them; b"" if no block is open."""
        if not self.open:
            return b""
        events = b""
        if self.open == "thought":
            signature = fields.opaque_token(self._ids[0])
            events = self._write_delta(api.SignatureDelta(type="signature_delta", signature=signature))
        self.open = ""
        return events + self._end_block()

    def call(self, call: Call) -> bytes:
        """Return the events of a tool call's block. It is parsed once it is complete: its arguments are one piece."""
        start = self._begin_block(api.ToolUseBlock(type="tool_use", id=call.id, name=call.name, input={}))
        arguments = self._write_delta(api.InputJSONDelta(type="input_json_delta", partial_json=call.arguments))
        return start + arguments + self._end_block()

    def _begin_block(self, block: api.TextBlock | api.ThinkingBlock | api.ToolUseBlock) -> bytes:
        return _write_event(
            api.RawContentBlockStartEvent(type="content_block_start", index=self._index, content_block=block)
        )

    def _write_delta(self, delta: api.RawContentBlockDelta) -> bytes:
        return _write_event(api.RawContentBlockDeltaEvent(type="content_block_delta", index=self._index, delta=delta))

    def _end_block(self) -> bytes:
        stop_event = api.RawContentBlockStopEvent(type="content_block_stop", index=self._index)
        self._index += 1
        return _write_event(stop_event)


class AnthropicDialect(Dialect):
    """Requests to `/v1/messages` and `/v1/messages/count_tokens`, which have the same fields."""

    writer = AnthropicEvents
    id_prefix = "msg_"
    call_prefix = "toolu_"

    def read(self, body: Json) -> ModelRequest:
        """Parse the JSON body of a request; a BadRequest names the field that is invalid or unsupported."""
        fields.check_fields(body, KNOWN, IGNORED, NEUTRAL)
        if body.get("thread") is not None:
            # Anthropic's client library repeats the request with the whole history when it reads these details.
            details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            raise BadRequest("thread is not supported: send the whole history", "thread", details=details)

        # An edit that keeps all thoughts removes nothing, and is accepted.
        edits = fields.read_object(body.get("context_management"), "context_management").get("edits")
        for _, edit in fields.read_objects(edits, "context_management.edits"):
            if edit.get("keep") != "all":
                raise BadRequest(
                    f"context_management: the edit {fields.shorten_value(edit.get('type'))} is not supported",
                    "context_management",
                )
        tools = tuple(_read_tool(tool, path) for path, tool in fields.read_objects(body.get("tools"), "tools"))
        choice = fields.read_object(body.get("tool_choice"), "tool_choice")
        output = fields.read_object(body.get("output_config"), "output_config")
        output_fields = {name for name, value in output.items() if value is not None}
        if output_fields - {"effort", "format"}:
            raise BadRequest("output_config supports effort and format only", "output_config")

        return ModelRequest(
            body["model"],
            fields.arrange_conversation(_read_messages(body), "messages"),
            tools,
            fields.check_choice(_read_choice(choice), tools),
            not fields.read_boolean(choice, "disable_parallel_tool_use"),
            max_tokens=fields.read_integer(body, "max_tokens"),
            stop=fields.stop_strings(body, "stop_sequences"),
            schema=fields.answer_schema(output.get("format") or body.get("output_format"), "output_config.format"),
            stream=fields.read_boolean(body, "stream"),
            stream_usage=True,
            overridden={**fields.overridden_settings(body, SAMPLING), **fields.overridden_settings(output, ["effort"])},
        )

    def complete(self, request: ModelRequest, turns: Sequence[ModelTurn]) -> Mapping[str, Json]:
        """Return the JSON body of an answer that is not streamed."""
        turn = turns[0]
        content: list[Json] = []
        if turn.thought:
            # Nothing checks the signature, but clients omit a thought without one from later requests.
            signature = fields.opaque_token(turn.id)
            content.append(api.ThinkingBlock(type="thinking", thinking=turn.thought, signature=signature))
        if turn.content:
            content.append(api.TextBlock(type="text", text=turn.content))
        content += [
            api.ToolUseBlock(type="tool_use", id=call.id, name=call.name, input=json.loads(call.arguments))
            for call in turn.calls
        ]

        message = _start_message(request, turn.id, _turn_usage(turn))
        message = message.model_copy(update={"content": content, **_stop_reason(turn).model_dump(exclude_unset=True)})
        return message.model_dump(exclude_unset=True)

    def error(self, error: BadRequest) -> Mapping[str, Json]:
        """Return the JSON body of an error."""
        kind = ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        details = {"details": error.details} if error.details else {}
        return {"type": "error", "error": {"type": kind, "message": str(error), **details}}


def _write_event(event: BaseModel) -> bytes:
    data = event.model_dump(exclude_unset=True)
    return fields.server_sent(data, data["type"])


def _start_message(request: ModelRequest, turn_id: str, usage: api.Usage) -> api.Message:
    """Return an answer's message before it has content."""
    return api.Message(
        id=turn_id,
        type="message",
        role="assistant",
        model=request.model,
        content=[],
        stop_reason=None,
        stop_sequence=None,
        usage=usage,
    )


def _turn_usage(turn: ModelTurn) -> api.Usage:
    # Here, unlike in OpenAI's dialects, cached tokens are not counted as input.
    return api.Usage(
        input_tokens=turn.prompt_tokens - turn.cached_tokens,
        cache_read_input_tokens=turn.cached_tokens,
        cache_creation_input_tokens=0,
        output_tokens=turn.completion_tokens,
    )


def _stop_reason(turn: ModelTurn) -> StopDelta:
    if turn.finish == "stop" and turn.stop is not None:
        return StopDelta(stop_reason="stop_sequence", stop_sequence=turn.stop)
    reasons: Mapping[str, Json] = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
    return StopDelta(stop_reason=reasons[turn.finish], stop_sequence=None)


def _read_messages(body: Mapping[str, Json]) -> list[Message]:
    # Claude Code's billing block changes with its versions, and would change the prompt.
    blocks = [
        block
        for _, block in _read_blocks(body.get("system"), "system")
        if not str(block.get("text", "")).startswith(BILLING)
    ]
    messages: list[Message] = [{"role": "system", "content": fields.text_of(blocks, "system", TEXT)}]
    entries = fields.read_objects(body.get("messages"), "messages")
    fields.require_field(bool(entries), "messages", "a list of at least one message", entries)

    for path, message in entries:
        role = message.get("role")
        if role == "assistant":
            fields.append_assistant(messages, _read_assistant(message.get("content"), f"{path}.content"))
        elif role == "user":
            _add_user(messages, message.get("content"), f"{path}.content")
        elif role == "system":
            messages.append({"role": "system", "content": fields.text_of(message.get("content"), path, TEXT)})
        else:
            raise BadRequest(f"{path}.role {fields.shorten_value(role)} is neither user nor assistant", path)

    # The role of the last message. Anthropic's API continues the text of an assistant's message there.
    if role == "assistant":
        raise BadRequest("the last message is the assistant's: a text that was started cannot be continued", "messages")
    return messages


def _read_blocks(content: Json, path: str) -> list[tuple[str, dict[str, Json]]]:
    """Return the blocks of a content, each with its path in the request; a text is one block."""
    return fields.read_objects([{"type": "text", "text": content}] if isinstance(content, str) else content, path)


def _read_assistant(content: Json, path: str) -> Message:
    texts: dict[str, str] = {"thinking": "", "text": ""}  # by the type of block
    calls = []

    for block_path, block in _read_blocks(content, path):
        kind = block.get("type")
        if isinstance(kind, str) and kind in texts:
            # A block's text is in the field that is named like its type.
            texts[kind] += fields.text_of([block], path, {kind: kind})
        elif kind == "tool_use":
            arguments = fields.arguments_of(block.get("input"), f"{block_path}.input")
            calls.append(
                Call(fields.read_string(block, "id", path), fields.read_string(block, "name", path), arguments)
            )
        # An encrypted thought is skipped: only another model can have written it.
        elif kind != "redacted_thinking":
            raise BadRequest(f"{path}: a block of type {fields.shorten_value(kind)} is not supported", path)

    return fields.assistant_message(texts["thinking"], texts["text"], calls)


def _add_user(messages: list[Message], content: Json, path: str) -> None:
    """Append a user's message in the order of its blocks: a message for each tool result, and one for the texts
    between two results."""
    text_blocks: list[Json] = []  # since the last tool result
    for block_path, block in _read_blocks(content, path):
        if block.get("type") != "tool_result":
            text_blocks.append(block)
            continue
        if text_blocks:
            messages.append({"role": "user", "content": fields.text_of(text_blocks, path, TEXT)})
            text_blocks = []

        text = fields.text_of(block.get("content"), f"{block_path}.content", TEXT)
        # Templates have no field for failed calls: the text says it, unless it does so at its beginning already.
        if block.get("is_error") and "error" not in text[:80].lower():
            text = f"error: {text}"
        messages.append(
            {
                "role": "tool",
                "content": text,
                "call_id": fields.read_string(block, "tool_use_id", block_path),
                "name": "",
            }
        )

    if text_blocks:
        messages.append({"role": "user", "content": fields.text_of(text_blocks, path, TEXT)})


def _read_tool(tool: Mapping[str, Json], path: str) -> Schema:
    if tool.get("type") not in (None, "custom"):
        raise BadRequest(f"{path}: a tool of type {fields.shorten_value(tool['type'])} is not supported", "tools")
    return fields.tool_schema(
        fields.read_string(tool, "name", path), tool.get("description"), tool.get("input_schema"), path
    )


def _read_choice(choice: Mapping[str, Json]) -> str:
    kind = choice.get("type", "auto")
    if kind == "tool":
        return f"function:{fields.read_string(choice, 'name', 'tool_choice')}"
    if not isinstance(kind, str) or kind not in CHOICES:
        raise BadRequest(f"tool_choice of type {fields.shorten_value(kind)} is not supported", "tool_choice")
    return CHOICES[kind]
