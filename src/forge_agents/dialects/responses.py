"""OpenAI's Responses API, which codex and OpenAI's agent frameworks use.

A function in a namespace is offered to the model as `namespace.function`. A call of it is sent to the client with the
namespace and the name in separate fields, by which codex looks it up. Tools that OpenAI's servers would execute, such
as web search, are not offered to the model: a client that lists one alongside its functions works without it.

The ids of items are derived from the ids of the turn and of its calls, so that the events of a stream and the whole
response in its last event name the same items.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Literal, TypeAlias, get_args

from openai.types import responses as api
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_reasoning_item import Summary
from pydantic import BaseModel

from ..messages import BadRequest, Call, Message, ModelRequest, ModelTurn, Schema
from . import Dialect, ItemWriter, fields
from .fields import Json, opaque_token, server_sent

SAMPLING = ("temperature", "top_p", "top_k", "seed", "reasoning")
KNOWN = {
    *SAMPLING,
    *("model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "previous_response_id"),
    *("max_output_tokens", "text", "stream", "stream_options"),
}
# `truncation`: a context is never truncated here. `max_tool_calls` limits only tools that a server executes.
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

Item: TypeAlias = api.ResponseOutputMessage | api.ResponseFunctionToolCall | api.ResponseReasoningItem
Status = Literal["in_progress", "completed", "incomplete"]

ID_PREFIX = "resp_"
# Between a namespace and the name of a function in it. OpenAI allows a dot in neither, so that the joined name can be
# split again.
SEPARATOR = "."


def reasoning_item(turn_id: str, thought: str) -> api.ResponseReasoningItem:
    """Return a reasoning item whose summary is the whole thought; "" gives an item without a summary.

    Its encrypted content is a token without meaning: clients send an item back in later requests only if it has one.
    """
    summary = [Summary(type="summary_text", text=thought)] if thought else []
    return api.ResponseReasoningItem(
        id=f"rs_{turn_id.removeprefix(ID_PREFIX)}",
        type="reasoning",
        summary=summary,
        encrypted_content=opaque_token(turn_id),
    )


def message_item(turn_id: str, text: str, status: Status) -> api.ResponseOutputMessage:
    """Return a message item of the assistant with one part, the text; without a part if the text is ""."""
    return api.ResponseOutputMessage(
        id=f"msg_{turn_id.removeprefix(ID_PREFIX)}",
        type="message",
        role="assistant",
        status=status,
        content=[text_part(text)] if text else [],
    )


def text_part(text: str) -> api.ResponseOutputText:
    """Return a text as the part of a message item."""
    return api.ResponseOutputText(type="output_text", text=text, annotations=[], logprobs=[])


def call_item(call: Call, status: Status = "completed") -> api.ResponseFunctionToolCall:
    """Return the item of a tool call. The name `namespace.function` becomes its fields `namespace` and `name`."""
    namespace, separator, name = call.name.partition(SEPARATOR)
    return api.ResponseFunctionToolCall.model_validate(
        {
            "id": f"fc_{call.id.removeprefix('call_')}",
            "type": "function_call",
            "call_id": call.id,
            "name": name if separator else call.name,
            "arguments": call.arguments,
            "status": status,
            **({"namespace": namespace} if separator else {}),
        }
    )


def make_response(
    request: ModelRequest, turn_id: str, items: Sequence[Item], created: float, turn: ModelTurn | None = None
) -> api.Response:
    """Return the response object for a request. It does not repeat the request's tools and sampling settings.

    Args:
        turn_id: the id of the turn, and of the response.
        items: its output so far.
        created: when it was started, in seconds since the epoch.
        turn: the complete answer; None: it is still in progress, and has no usage.
    """
    tool = request.tool_choice.removeprefix("function:")
    choice: Json = tool if tool == request.tool_choice else {"type": "function", "name": tool}
    truncated = turn is not None and turn.finish == "length"
    final_status = "incomplete" if truncated else "completed"
    return api.Response.model_validate(
        {
            "id": turn_id,
            "object": "response",
            "created_at": created,
            "status": "in_progress" if turn is None else final_status,
            "model": request.model,
            "output": list(items),
            "error": None,
            "incomplete_details": IncompleteDetails(reason="max_output_tokens") if truncated else None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": request.parallel_calls,
            "previous_response_id": request.previous or None,
            "max_output_tokens": request.max_tokens,
            "tool_choice": choice,
            "tools": [],
            "temperature": None,
            "top_p": None,
            "usage": None if turn is None else _turn_usage(turn),
        }
    )


def _turn_usage(turn: ModelTurn) -> Mapping[str, Json]:
    return {
        "input_tokens": turn.prompt_tokens,
        "input_tokens_details": {"cached_tokens": turn.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": turn.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": turn.thought_tokens},
        "total_tokens": turn.prompt_tokens + turn.completion_tokens,
    }


class ResponsesEvents(ItemWriter):
    """Writer of one response as Responses API items: a thought or text with one part, or a tool call."""

    def __init__(self, request: ModelRequest, ids: Sequence[str]) -> None:
        super().__init__(request, ids)
        self._id = ids[0]
        self._created = time.time()
        self._numbers = count()  # sequence numbers of events
        self._items: list[Item] = []  # the complete items
        self._text = ""  # of the open item so far

    def begin(self, prompt_tokens: int) -> bytes:
        """Return the two events that announce a response without output."""
        started = make_response(self._request, self._id, [], self._created)
        created = self._write_event(api.ResponseCreatedEvent, response=started)
        return created + self._write_event(api.ResponseInProgressEvent, response=started)

    def end(self, turns: Sequence[ModelTurn]) -> bytes:
        """Return the events that complete the open item, then the event with the whole response."""
        turn = turns[0]
        truncated = turn.finish == "length"
        closing = self.close("incomplete" if truncated else "completed")
        finished = make_response(self._request, self._id, self._items, self._created, turn)
        last_event = api.ResponseIncompleteEvent if truncated else api.ResponseCompletedEvent
        return closing + self._write_event(last_event, response=finished)

    def failure(self, error: BadRequest) -> bytes:
        """Return the event of a failed response, with its complete items and the error."""
        code = error.code or ("rate_limit_exceeded" if error.status == 429 else "server_error")
        failed = make_response(self._request, self._id, self._items, self._created)
        failed.status = "failed"
        # Not validated: clients act on more codes than the package's type allows.
        failed.error = api.ResponseError.model_construct(code=code, message=str(error))
        return self._write_event(api.ResponseFailedEvent, response=failed)

    def _write_event(self, model: type[BaseModel], **values: Json) -> bytes:
        # The annotation of `type` is a Literal with the event's one name.
        event_type = get_args(model.model_fields["type"].annotation)[0]
        event = model(type=event_type, sequence_number=next(self._numbers), **values)
        return server_sent(event.model_dump(exclude_unset=True, warnings=False), event_type)

    def _write_part(self, model: type[BaseModel], **values: Json) -> bytes:
        """Return an event about the open item's only part, which has index 0."""
        part_index = {"summary_index" if self.open == "thought" else "content_index": 0}
        return self._write_event(
            model, item_id=self._blank_item().id, output_index=len(self._items), **part_index, **values
        )

    def _blank_item(self) -> Item:
        """Return the open item without its text."""
        return reasoning_item(self._id, "") if self.open == "thought" else message_item(self._id, "", "in_progress")

    def begin_item(self, kind: str) -> bytes:
        """Return the events that start an item without text, and its empty part."""
        self._text = ""
        added = self._write_event(
            api.ResponseOutputItemAddedEvent, output_index=len(self._items), item=self._blank_item()
        )
        if kind == "thought":
            return added + self._write_part(
                api.ResponseReasoningSummaryPartAddedEvent, part={"type": "summary_text", "text": ""}
            )
        return added + self._write_part(api.ResponseContentPartAddedEvent, part=text_part(""))

    def piece(self, kind: str, text: str) -> bytes:
        """Return the event that appends a text to the open item."""
        self._text += text
        if kind == "thought":
            return self._write_part(api.ResponseReasoningSummaryTextDeltaEvent, delta=text)
        return self._write_part(api.ResponseTextDeltaEvent, delta=text, logprobs=[])

    def close(self, status: Status = "completed") -> bytes:
        """Return the events that repeat the open item's whole text, part and item; b"" if no item is open."""
        if not self.open:
            return b""
        if self.open == "thought":
            events = self._write_part(api.ResponseReasoningSummaryTextDoneEvent, text=self._text)
            events += self._write_part(
                api.ResponseReasoningSummaryPartDoneEvent, part={"type": "summary_text", "text": self._text}
            )
            item: Item = reasoning_item(self._id, self._text)
        else:
            events = self._write_part(api.ResponseTextDoneEvent, text=self._text, logprobs=[])
            events += self._write_part(api.ResponseContentPartDoneEvent, part=text_part(self._text))
            item = message_item(self._id, self._text, status)
        self.open = ""
        return events + self._finish_item(item)

    def call(self, call: Call) -> bytes:
        """Return the events of a tool call. It is parsed once it is complete, so its arguments are one piece."""
        item = call_item(call)
        position: dict[str, Json] = {"item_id": item.id, "output_index": len(self._items)}
        started = item.model_copy(update={"arguments": "", "status": "in_progress"})
        events = self._write_event(api.ResponseOutputItemAddedEvent, output_index=len(self._items), item=started)
        events += self._write_event(api.ResponseFunctionCallArgumentsDeltaEvent, **position, delta=call.arguments)
        events += self._write_event(
            api.ResponseFunctionCallArgumentsDoneEvent, **position, name=item.name, arguments=call.arguments
        )
        return events + self._finish_item(item)

    def _finish_item(self, item: Item) -> bytes:
        # The event has the item's index, so it is written before the item is appended.
        event = self._write_event(api.ResponseOutputItemDoneEvent, output_index=len(self._items), item=item)
        self._items.append(item)
        return event


class ResponsesDialect(Dialect):
    """Requests to `/v1/responses`."""

    writer = ResponsesEvents
    id_prefix = ID_PREFIX

    def read(self, body: Json) -> ModelRequest:
        """Parse the JSON body of a request; a BadRequest names the field that is invalid or unsupported."""
        fields.check_fields(body, KNOWN, IGNORED, NEUTRAL)
        tools = tuple(_read_tools(body.get("tools"), "tools"))
        text = fields.read_object(body.get("text"), "text")
        previous = body.get("previous_response_id")
        fields.require_field(
            previous is None or isinstance(previous, str), "previous_response_id", "the id of a response", previous
        )

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
        """Return the JSON body of an answer that is not streamed."""
        turn = turns[0]
        items: list[Item] = []
        if turn.thought:
            items.append(reasoning_item(turn.id, turn.thought))
        if turn.content:
            # With calls after it, the text is complete: the limit of tokens has cut the last call.
            is_cut = turn.finish == "length" and not turn.calls
            items.append(message_item(turn.id, turn.content, "incomplete" if is_cut else "completed"))
        items += map(call_item, turn.calls)
        return make_response(request, turn.id, items, time.time(), turn).model_dump(exclude_unset=True)


def _read_messages(body: Mapping[str, Json]) -> list[Message]:
    messages: list[Message] = []
    instructions = body.get("instructions")
    fields.require_field(instructions is None or isinstance(instructions, str), "instructions", "a text", instructions)
    if instructions:
        messages.append({"role": "system", "content": instructions})
    # The field may be one text, the user's message, instead of a list of items.
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
        # Clients send the text in `content` or in `summary`; where both are sent, the summary is an abridged version.
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
        messages.append(
            {"role": "tool", "content": content, "call_id": fields.read_string(item, "call_id", path), "name": ""}
        )
    elif kind == "message":
        role = item.get("role")
        joint = "" if role == "assistant" else "\n"
        content = fields.text_of(item.get("content"), f"{path}.content", PARTS, joint)
        if role == "assistant":
            fields.append_assistant(messages, fields.assistant_message(content=content))
        elif role in ("user", "system", "developer"):
            messages.append({"role": "user" if role == "user" else "system", "content": content})
        else:
            raise BadRequest(
                f"{path}.role {fields.shorten_value(role)} must be user, system, developer or assistant", path
            )
    else:
        raise BadRequest(f"{path}: an item of type {fields.shorten_value(kind)} is not supported", path)


def _read_tools(tools: Json, list_path: str, namespace: str = "") -> Iterator[Schema]:
    """Yield the functions in a list of tools at `list_path` of a request, including those in namespaces.

    Args:
        namespace: the namespace that has the list; "": it is the request's own list.
    """
    # A namespace holds functions only: no namespace, and no tool that a server executes.
    supported = ("function",) if namespace else ("function", "namespace")
    for path, tool in fields.read_objects(tools, list_path):
        kind = tool.get("type")
        # Clients list these by default, and work without them.
        if isinstance(kind, str) and kind in SERVER_TOOLS and not namespace:
            continue
        if kind not in supported:
            raise BadRequest(f"{path}: a tool of type {fields.shorten_value(kind)} is not supported", "tools")
        name = fields.read_string(tool, "name", path)

        # OpenAI's rule for names. A name with a dot would also be read as a namespace and a function in it.
        if not NAME.fullmatch(name):
            raise BadRequest(
                f"{path}.name {fields.shorten_value(name)} must have only the characters a-z A-Z 0-9 _ -", "tools"
            )

        if kind == "namespace":
            yield from _read_tools(tool.get("tools"), f"{path}.tools", name)
        else:
            name = f"{namespace}{SEPARATOR}{name}" if namespace else name
            yield fields.tool_schema(name, tool.get("description"), tool.get("parameters"), path)
