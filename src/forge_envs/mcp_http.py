"""The HTTP transport of MCP clients: an invalid response fails its own request, not the whole session."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

from forge.system.bounded_http import bounded_transport

from .content import Json
from .mcp_messages import encoded, failure, is_answer
from .mcp_sdk import http

_BLANK = re.compile(rb"(?:\r\n|\n|\r(?!\n))[\r\n]")  # a blank line ends an event


class IsolatedTransport(bounded_transport(http)):  # type: ignore[misc]
    """Turns invalid responses into errors of their own request; the SDK would end the session, or wait for others."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    async def handle_async_request(self, request: Any) -> Any:
        # GET opens a stream of notifications, whose failure is not a call's.
        if request.method != "POST":
            return await super().handle_async_request(request)
        number = json.loads(request.content).get("id")
        try:
            response = await super().handle_async_request(request)
            if response.status_code < 300:
                if number is None:
                    return response
                if response.headers.get("content-type", "").startswith("text/event-stream"):
                    response.stream = CheckedEvents(response.stream, number, self._name)
                    return response
            text = (await response.aread()).decode(errors="replace")
        except http.TransportError as error:
            return self._failed(number, f"{self._name}: {error or type(error).__name__}", lost=True)
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            document = None
        # A server may also report an error of the protocol with an HTTP error status.
        status = response.status_code
        if is_answer(document) and (status < 300 or document.get("id") == number):
            headers = {n: v for n, v in response.headers.items() if n.lower() == "mcp-session-id"}
            try:
                # The answer to this request, whatever its number: it may be null, of a server that read none.
                body = encoded({**document, "id": number})
            except ValueError:
                return self._failed(number, f"{self._name} answered with what is not MCP: {text[:500]!r}", lost=False)
            headers["content-type"] = "application/json"
            return http.Response(200, content=body, headers=headers, request=request)
        if 300 <= status < 400:  # following it would carry the headers to another server
            text = f"it redirects to {response.headers.get('Location', 'elsewhere')}: use that url"
        if status < 300:
            kind = "no JSON" if document is None else "what is not MCP"
            return self._failed(number, f"{self._name} answered with {kind}: {text[:500]!r}", lost=False)
        # An unknown session is 404, in many implementations 400.
        lost = status == 404 or (status == 400 and "session" in text.lower())
        return self._failed(number, f"{self._name} answered with status {status}: {text[:500]}", lost)

    def _failed(self, number: Json, message: str, lost: bool) -> Any:
        # A notification has no answer.
        return http.Response(202) if number is None else http.Response(200, json=failure(number, message, lost))


class CheckedEvents(http.AsyncByteStream):  # type: ignore[misc]
    """The events that answer a request. An event that is not MCP becomes the request's error, and so does the end of
    the stream before the answer, unless the SDK can resume it: an event had an id."""

    def __init__(self, stream: Any, number: Json, name: str) -> None:
        self._stream = stream
        self._number = number
        self._name = name
        self._answered = False
        self._resumable = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the events, each checked."""
        reason = "ended its events without an answer"
        try:
            async for event in _events(self._stream):
                yield self._checked(event)
        except http.TransportError as error:
            if self._resumable:
                raise
            reason = f"broke off its answer: {error or type(error).__name__}"
        if not self._answered and not self._resumable:
            yield self._failed(reason)

    async def aclose(self) -> None:
        """Close the stream."""
        await self._stream.aclose()

    def _checked(self, event: bytes) -> bytes:
        fields = [
            (name, value.removeprefix(b" ")) for name, _, value in (x.partition(b":") for x in event.splitlines())
        ]
        self._resumable |= any(name == b"id" and value for name, value in fields)
        kind = next((value for name, value in reversed(fields) if name == b"event"), b"message")
        data = b"\n".join(value for name, value in fields if name == b"data").decode(errors="replace")
        if not data or kind != b"message":
            return event
        try:
            document = json.loads(data)
            answers = is_answer(document)
            body = encoded({**document, "id": self._number} if answers else document)
        except (ValueError, RecursionError):
            return self._failed(f"answered with what is not MCP: {data[:500]!r}")
        self._answered |= answers
        # ASCII, for the SDK's reader of lines ends them at further characters.
        ascii_body = json.dumps(json.loads(body)).encode()
        others = b"".join(name + b": " + value + b"\n" for name, value in fields if name and name != b"data")
        return others + b"data: " + ascii_body + b"\n\n"

    def _failed(self, reason: str) -> bytes:
        self._answered = True
        return b"data: " + json.dumps(failure(self._number, f"{self._name} {reason}")).encode() + b"\n\n"


async def _events(stream: Any) -> AsyncIterator[bytes]:
    """Yield the events of a stream, each with the blank line that ends it."""
    text = bytearray()
    async for chunk in stream:
        start = max(0, len(text) - 3)  # a blank line may be split between two chunks
        text += chunk
        while blank := _BLANK.search(text, start):
            yield bytes(text[: blank.end()])
            del text[: blank.end()]
            start = 0
    # An event that no blank line ends does not count.
