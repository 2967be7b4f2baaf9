"""An HTTP transport for servers that are not trusted: their answers have a limit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

LONGEST = 16 << 20  # bytes of an answer, or of one line of an event stream


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
            lines = response.headers.get("Content-Type", "").startswith("text/event-stream")
            response.stream = Bounded(response.stream, lines, request)
            return response

    class Bounded(httpx.AsyncByteStream):  # type: ignore[name-defined, misc]
        def __init__(self, stream: Any, lines: bool, request: Any) -> None:
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

    return Transport
