"""An httpx transport for servers that are not trusted: their answers have a limit, and lead to no other server."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import httpx

LONGEST = 16 << 20  # bytes of an answer, or of one event of a stream
_BLANK = re.compile(rb"(?:\r\n|\n|\r(?!\n))[\r\n]")  # a blank line ends an event


class BoundedTransport(httpx.AsyncHTTPTransport):
    """Asks for answers without compression and raises httpx.ReadError at one that is compressed or longer than LONGEST.

    Clients that use it should not follow redirects: httpx sends their own headers, with any key in them, to the new
    address too.
    """

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        request.headers["Accept-Encoding"] = "identity"
        response = await super().handle_async_request(request)
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            await response.aclose()
            raise httpx.ReadError(
                f"the answer is compressed ({encoding[:20]}), which was not asked for", request=request
            )
        assert isinstance(response.stream, httpx.AsyncByteStream)
        events = response.headers.get("Content-Type", "").startswith("text/event-stream")
        response.stream = _Bounded(response.stream, events, request)
        return response


class _Bounded(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, events: bool, request: httpx.Request) -> None:
        self._stream, self._events, self._request = stream, events, request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        taken, before = 0, b""
        async for chunk in self._stream:
            taken += len(chunk)
            if self._events:
                text = before + chunk
                for blank in _BLANK.finditer(text):
                    taken = len(text) - blank.end()
                before = text[-3:]
            if taken > LONGEST:
                raise httpx.ReadError(f"the answer is longer than {LONGEST} bytes", request=self._request)
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
