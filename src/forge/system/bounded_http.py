"""An HTTP transport for servers that are not trusted: their answers have a limit."""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator
from types import ModuleType
from typing import Any

LONGEST = 16 << 20  # bytes of an answer, or of one event of a stream
_BLANK = re.compile(rb"(?:\r\n|\n|\r(?!\n))[\r\n]")  # a blank line ends an event


def bounded_transport(httpx: ModuleType) -> Any:
    """A class of transports of `httpx`, or of its successor `httpx2`.

    It asks for answers without compression and raises the library's ReadError at one that is compressed or longer than
    LONGEST. Clients that use it should not follow redirects: their own headers, with any key in them, would be sent to
    the new address too.
    """

    class Transport(httpx.AsyncHTTPTransport):  # type: ignore[name-defined, misc]
        async def handle_async_request(self, request: Any) -> Any:
            request.headers["Accept-Encoding"] = "identity"
            response = await super().handle_async_request(request)
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding != "identity":
                await response.aclose()
                raise httpx.ReadError(f"the answer is compressed ({encoding[:20]})", request=request)
            response.stream = Bounded(response, request)
            return response

    class Bounded(httpx.AsyncByteStream):  # type: ignore[name-defined, misc]
        def __init__(self, response: Any, request: Any) -> None:
            self._stream, self._request = response.stream, request
            self._events = response.headers.get("Content-Type", "").startswith("text/event-stream")

        async def __aiter__(self) -> AsyncIterator[bytes]:
            try:
                async for chunk in bounded(self._stream, self._events):
                    yield chunk
            except OverflowError as error:
                raise httpx.ReadError(str(error), request=self._request) from None

        async def aclose(self) -> None:
            await self._stream.aclose()

    return Transport


async def bounded(stream: AsyncIterable[bytes], events: bool) -> AsyncIterator[bytes]:
    """The chunks of a stream. OverflowError: it, or with `events` one event of it, is longer than LONGEST."""
    taken, before = 0, b""
    async for chunk in stream:
        taken += len(chunk)
        if events:
            text = before + chunk
            for blank in _BLANK.finditer(text):
                taken = len(text) - blank.end()
            before = text[-3:]
        if taken > LONGEST:
            raise OverflowError(f"the answer is longer than {LONGEST} bytes")
        yield chunk
