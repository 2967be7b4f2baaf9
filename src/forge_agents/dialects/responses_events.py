"""Answers in the form of OpenAI's Responses: items of output, and the events in which a stream sends them.

The ids of items are made of the ids of the turn and of its calls, so that a stream and its last event name the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Literal, get_args

from openai.types import responses as api
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_reasoning_item import Summary
from pydantic import BaseModel

from ..messages import BadRequest, Call, ModelRequest, ModelTurn
from . import ItemWriter
from .fields import Json, opaque_token, server_sent

Item = api.ResponseOutputMessage | api.ResponseFunctionToolCall | api.ResponseReasoningItem
Status = Literal["in_progress", "completed", "incomplete"]

ID_PREFIX = "resp_"
# Between a namespace and the name of a function in it. OpenAI allows it in neither, so a name can be split again.
SEPARATOR = "."


def output_items(turn: ModelTurn) -> list[Item]:
    """Return the items of an answer: thought, text, calls."""
    items: list[Item] = []
    if turn.thought:
        items.append(reasoning_item(turn.id, turn.thought))
    if turn.content:
        status: Status = "incomplete" if turn.finish == "length" and not turn.calls else "completed"
        items.append(message_item(turn.id, turn.content, status))
    return [*items, *(call_item(call) for call in turn.calls)]


def reasoning_item(identity: str, thought: str) -> api.ResponseReasoningItem:
    """Return a thought, whole, as its summary. Clients send an item back if it has encrypted content, so it has a
    token."""
    summary = [Summary(type="summary_text", text=thought)] if thought else []
    return api.ResponseReasoningItem(
        id=f"rs_{identity.removeprefix(ID_PREFIX)}",
        type="reasoning",
        summary=summary,
        encrypted_content=opaque_token(identity),
    )


def message_item(identity: str, text: str, status: Status) -> api.ResponseOutputMessage:
    """Return a text; without a part while it is empty."""
    return api.ResponseOutputMessage(
        id=f"msg_{identity.removeprefix(ID_PREFIX)}",
        type="message",
        role="assistant",
        status=status,
        content=[text_part(text)] if text else [],
    )


def text_part(text: str) -> api.ResponseOutputText:
    """Return the text of a message."""
    return api.ResponseOutputText(type="output_text", text=text, annotations=[], logprobs=[])


def call_item(call: Call, status: Status = "completed") -> api.ResponseFunctionToolCall:
    """Return a call; of a function in a namespace it has both names."""
    namespace, separator, name = call.name.partition(SEPARATOR)
    values = {
        "id": f"fc_{call.id.removeprefix('call_')}",
        "type": "function_call",
        "call_id": call.id,
        "name": name if separator else call.name,
        "arguments": call.arguments,
        "status": status,
    }
    if separator:
        values["namespace"] = namespace
    return api.ResponseFunctionToolCall.model_validate(values)


def make_response(
    request: ModelRequest, identity: str, items: Sequence[Item], created: float, turn: ModelTurn | None = None
) -> api.Response:
    """Return the object that answers a request; without a turn it is in progress. Tools and settings are not
    repeated."""
    tool = request.tool_choice.removeprefix("function:")
    choice: Json = tool if tool == request.tool_choice else {"type": "function", "name": tool}
    truncated = turn is not None and turn.finish == "length"
    values: dict[str, Json] = {
        "id": identity,
        "object": "response",
        "created_at": created,
        "status": "in_progress" if turn is None else "incomplete" if truncated else "completed",
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

    return api.Response.model_validate(values)


def _turn_usage(turn: ModelTurn) -> Mapping[str, Json]:
    # How many of the tokens are the thought's is not counted: the field is required, and 0.
    return {
        "input_tokens": turn.prompt_tokens,
        "input_tokens_details": {"cached_tokens": turn.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": turn.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": turn.prompt_tokens + turn.completion_tokens,
    }


class ResponsesEvents(ItemWriter):
    """Writes one answer; its items have one part."""

    def __init__(self, request: ModelRequest, ids: Sequence[str]) -> None:
        super().__init__(request, ids)
        self._id = ids[0]
        self._created = time.time()
        self._numbers = count()
        self._items: list[Item] = []  # that are complete
        self._text = ""  # of the open item

    def begin(self, prompt_tokens: int) -> bytes:
        """Return the response while it has no output."""
        started = make_response(self._request, self._id, [], self._created)
        created = self._write_event(api.ResponseCreatedEvent, response=started)
        return created + self._write_event(api.ResponseInProgressEvent, response=started)

    def end(self, turns: Sequence[ModelTurn]) -> bytes:
        """Return the end of the open item, and the whole response."""
        # The limit of tokens also cuts what the item would have said.
        turn = turns[0]
        truncated = turn.finish == "length"
        closing = self.close("incomplete" if truncated else "completed")
        finished = make_response(self._request, self._id, self._items, self._created, turn)
        last = api.ResponseIncompleteEvent if truncated else api.ResponseCompletedEvent
        return closing + self._write_event(last, response=finished)

    def failure(self, error: BadRequest) -> bytes:
        """Return the event of a failed response."""
        # The codes of the package's type are fewer than those that clients act on.
        code = error.code or ("rate_limit_exceeded" if error.status == 429 else "server_error")
        failed = make_response(self._request, self._id, self._items, self._created)
        failed.status = "failed"
        failed.error = api.ResponseError.model_construct(code=code, message=str(error))
        return self._write_event(api.ResponseFailedEvent, response=failed)

    def _write_event(self, model: type[BaseModel], **values: Json) -> bytes:
        kind = get_args(model.model_fields["type"].annotation)[0]
        event = model(type=kind, sequence_number=next(self._numbers), **values)
        return server_sent(event.model_dump(exclude_unset=True, warnings=False), kind)

    def _write_part(self, model: type[BaseModel], **values: Json) -> bytes:
        """Return an event about the only part of the open item."""
        index = {"summary_index" if self.open == "thought" else "content_index": 0}
        return self._write_event(model, item_id=self._blank_item().id, output_index=len(self._items), **index, **values)

    def _blank_item(self) -> Item:
        """Return the open item as it began."""
        return reasoning_item(self._id, "") if self.open == "thought" else message_item(self._id, "", "in_progress")

    def begin_item(self, kind: str) -> bytes:
        """Return a thought or a text without a letter."""
        self._text = ""
        added = self._write_event(
            api.ResponseOutputItemAddedEvent, output_index=len(self._items), item=self._blank_item()
        )
        if kind == "thought":
            part = {"type": "summary_text", "text": ""}
            return added + self._write_part(api.ResponseReasoningSummaryPartAddedEvent, part=part)
        return added + self._write_part(api.ResponseContentPartAddedEvent, part=text_part(""))

    def piece(self, kind: str, text: str) -> bytes:
        """Return the event of a piece of its text."""
        self._text += text
        if kind == "thought":
            return self._write_part(api.ResponseReasoningSummaryTextDeltaEvent, delta=text)
        return self._write_part(api.ResponseTextDeltaEvent, delta=text, logprobs=[])

    def close(self, status: Status = "completed") -> bytes:
        """Return the whole text, the whole part and the whole item."""
        if not self.open:
            return b""
        item: Item
        if self.open == "thought":
            part: Json = {"type": "summary_text", "text": self._text}
            events = self._write_part(api.ResponseReasoningSummaryTextDoneEvent, text=self._text)
            events += self._write_part(api.ResponseReasoningSummaryPartDoneEvent, part=part)
            item = reasoning_item(self._id, self._text)
        else:
            events = self._write_part(api.ResponseTextDoneEvent, text=self._text, logprobs=[])
            events += self._write_part(api.ResponseContentPartDoneEvent, part=text_part(self._text))
            item = message_item(self._id, self._text, status)
        self.open = ""
        return events + self._finish_item(item)

    def call(self, call: Call) -> bytes:
        """Return a call. It is generated before it is read: its arguments come in one piece."""
        item = call_item(call)
        position: dict[str, Json] = {"item_id": item.id, "output_index": len(self._items)}
        started = item.model_copy(update={"arguments": "", "status": "in_progress"})
        events = self._write_event(api.ResponseOutputItemAddedEvent, output_index=len(self._items), item=started)
        events += self._write_event(api.ResponseFunctionCallArgumentsDeltaEvent, **position, delta=call.arguments)
        values: dict[str, Json] = {"name": item.name, "arguments": call.arguments}
        events += self._write_event(api.ResponseFunctionCallArgumentsDoneEvent, **position, **values)
        return events + self._finish_item(item)

    def _finish_item(self, item: Item) -> bytes:
        event = self._write_event(api.ResponseOutputItemDoneEvent, output_index=len(self._items), item=item)
        self._items.append(item)
        return event
