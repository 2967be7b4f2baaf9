"""An httpx transport for servers that are not trusted: their answers have a limit, and lead to no other server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx

LONGEST = 16 << 20  # bytes of an answer, or of one line of an event stream


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
        lines = response.headers.get("Content-Type", "").startswith("text/event-stream")
        response.stream = _Bounded(response.stream, lines, request)
        return response


class _Bounded(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, lines: bool, request: httpx.Request) -> None:
        self._stream, self._lines, self._request = stream, lines, request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        taken = 0
        async for chunk in self._stream:
            end = chunk.rfind(b"\n") if self._lines else -1
            taken = taken + len(chunk) if end < 0 else len(chunk) - end - 1
            if taken > LONGEST:
                raise httpx.ReadError(f"the answer is longer than {LONGEST} bytes", request=self._request)
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
