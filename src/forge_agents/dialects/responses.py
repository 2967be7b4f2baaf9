"""OpenAI's Responses, as codex and the frameworks of OpenAI speak it.

Functions in a namespace are offered to the model as `namespace.function`, and a call of one has both names apart, by
which codex looks it up. Tools that OpenAI's servers would execute are not offered: a client that lists web search
alongside its functions works without it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence

from ..messages import BadRequest, Call, Message, ModelRequest, ModelTurn, Schema
from . import Dialect, fields
from .fields import Json
from .responses_events import ID_PREFIX, SEPARATOR, ResponsesEvents, make_response, output_items

SAMPLING = ("temperature", "top_p", "top_k", "seed", "reasoning")
KNOWN = {
    *SAMPLING,
    *("model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "previous_response_id"),
    *("max_output_tokens", "text", "stream", "stream_options"),
}
# A context is never truncated here, and only tools of the server count against `max_tool_calls`.
IGNORED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "client_metadata", "moderation", "truncation", "max_tool_calls", "background_options"),
}
NEUTRAL: Mapping[str, Sequence[Json]] = {
    "background": (False,),
    "include": ([], ["reasoning.encrypted_content"]),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
}
SERVER_TOOLS = {
    *("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp"),
    *("tool_search", "local_shell"),
}
NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
SUMMARY = {"summary_text": "text", "reasoning_text": "text", "text": "text"}


class ResponsesDialect(Dialect):
    """Requests to `/v1/responses`."""

    writer = ResponsesEvents
    id_prefix = ID_PREFIX

    def read(self, body: Json) -> ModelRequest:
        """Parse a body. BadRequest: names the unsupported field."""
        fields.check_fields(body, KNOWN, IGNORED, NEUTRAL)
        tools = tuple(_read_tools(body.get("tools"), "tools"))
        text = fields.read_object(body.get("text"), "text")
        previous = body.get("previous_response_id")
        is_id = previous is None or isinstance(previous, str)
        fields.require_field(is_id, "previous_response_id", "the id of a response", previous)

        return ModelRequest(
            body["model"],
            fields.arrange_conversation(_read_messages(body), "input"),
            tools,
            fields.openai_choice(body.get("tool_choice"), tools),
            fields.read_boolean(body, "parallel_tool_calls", True),
            max_tokens=fields.read_integer(body, "max_output_tokens"),
            schema=fields.answer_schema(text.get("format"), "text.format"),
            stream=fields.read_boolean(body, "stream"),
            stream_usage=True,
            previous=previous or "",
            overridden={
                **fields.overridden_settings(body, SAMPLING),
                **fields.overridden_settings(text, ["verbosity"]),
            },
        )

    def complete(self, request: ModelRequest, turns: Sequence[ModelTurn]) -> Mapping[str, Json]:
        """Return the body of an answer that is not streamed."""
        turn = turns[0]
        return make_response(request, turn.id, output_items(turn), time.time(), turn).model_dump(exclude_unset=True)


def _read_messages(body: Mapping[str, Json]) -> list[Message]:
    messages: list[Message] = []
    instructions = body.get("instructions")
    fields.require_field(instructions is None or isinstance(instructions, str), "instructions", "a text", instructions)
    if instructions:
        messages.append({"role": "system", "content": instructions})
    # A bare text is the message of a user.
    if isinstance(body.get("input"), str):
        return [*messages, {"role": "user", "content": body["input"]}]
    items = fields.read_objects(body.get("input"), "input")
    fields.require_field(bool(items), "input", "a text or a list of at least one item", items)
    for path, item in items:
        _add_item(messages, item, path)
    return messages


def _add_item(messages: list[Message], item: Mapping[str, Json], path: str) -> None:
    kind = item.get("type") or "message"

    if kind == "reasoning":
        # The text is in one of two fields; of a client that sends both, `content` is the unabridged one.
        thought = fields.text_of(item.get("content"), f"{path}.content", SUMMARY, "")
        thought = thought or fields.text_of(item.get("summary"), f"{path}.summary", SUMMARY, "")
        if thought:
            fields.append_assistant(messages, fields.assistant_message(thought))
    elif kind == "function_call":
        name = fields.read_string(item, "name", path)
        if item.get("namespace"):
            name = f"{fields.read_string(item, 'namespace', path)}{SEPARATOR}{name}"
        arguments = fields.arguments_of(item.get("arguments"), f"{path}.arguments")
        call = Call(fields.read_string(item, "call_id", path), name, arguments)
        fields.append_assistant(messages, fields.assistant_message(calls=[call]))
    elif kind == "function_call_output":
        content = fields.text_of(item.get("output"), f"{path}.output", PARTS)
        call_id = fields.read_string(item, "call_id", path)
        messages.append({"role": "tool", "content": content, "call_id": call_id, "name": ""})
    elif kind == "message":
        _add_message(messages, item, path)
    else:
        raise BadRequest(f"{path}: an item of type {fields.shorten_value(kind)} is not supported", path)


def _add_message(messages: list[Message], item: Mapping[str, Json], path: str) -> None:
    role = item.get("role")
    joint = "" if role == "assistant" else "\n"
    content = fields.text_of(item.get("content"), f"{path}.content", PARTS, joint)
    if role == "assistant":
        fields.append_assistant(messages, fields.assistant_message(content=content))
    elif role in ("user", "system", "developer"):
        messages.append({"role": "user" if role == "user" else "system", "content": content})
    else:
        raise BadRequest(
            f"{path}.role {fields.shorten_value(role)} is none of user, system, developer, assistant", path
        )


def _read_tools(tools: Json, place: str, namespace: str = "") -> Iterator[Schema]:
    """Read the functions that a client offers, including namespaces'."""
    for path, tool in fields.read_objects(tools, place):
        kind = tool.get("type")
        # A client that offers one of these works without it.
        if isinstance(kind, str) and kind in SERVER_TOOLS and not namespace:
            continue
        if kind not in ("function", "namespace") or (kind == "namespace" and namespace):
            raise BadRequest(f"{path}: a tool of type {fields.shorten_value(kind)} is not supported", "tools")
        name = fields.read_string(tool, "name", path)

        # OpenAI's rule for names; one with a dot would read as a namespace and a function in it.
        if not NAME.fullmatch(name):
            raise BadRequest(
                f"{path}.name {fields.shorten_value(name)} has other characters than a-z A-Z 0-9 _ -", "tools"
            )

        if kind == "namespace":
            yield from _read_tools(tool.get("tools"), f"{path}.tools", name)
        else:
            name = f"{namespace}{SEPARATOR}{name}" if namespace else name
            yield fields.tool_schema(name, tool.get("description"), tool.get("parameters"), path)
