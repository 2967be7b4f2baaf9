"""HTTP transports that bound the size of responses, for servers that are not trusted."""

import re
from collections.abc import AsyncIterable, AsyncIterator
from types import ModuleType
from typing import Any

MAX_BYTES = 16 << 20  # of a response, or of one event of a stream: far more than the longest completion of a model
Transport = Any  # classes and objects of httpx, which need not be installed
_BLANK = re.compile(rb"(?:\r\n|\n|\r(?!\n))[\r\n]")  # a blank line ends an event


def bounded_transport(httpx: ModuleType) -> Transport:
    """Return a class of transports that raise the library's ReadError for a response longer than MAX_BYTES.

    They also raise it for compressed responses, and request responses without compression. Clients that use them should
    not follow redirects: their headers, with any key in them, would be sent to the new address too.

    Args:
        httpx: the library, `httpx` or its successor `httpx2`.
    """

    class BoundedTransport(httpx.AsyncHTTPTransport):  # type: ignore[name-defined, misc]
        async def handle_async_request(self, request: Transport) -> Transport:
            request.headers["Accept-Encoding"] = "identity"
            response = await super().handle_async_request(request)
            # The library would unpack it before its size could be checked: a small response may become gigabytes.
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding != "identity":
                await response.aclose()
                raise httpx.ReadError(
                    f"the response is compressed ({encoding[:20]}), which is not supported", request=request
                )
            response.stream = BoundedStream(response, request)
            return response

    class BoundedStream(httpx.AsyncByteStream):  # type: ignore[name-defined, misc]
        def __init__(self, response: Transport, request: Transport) -> None:
            self._stream = response.stream
            self._request = request
            self._events = response.headers.get("Content-Type", "").startswith("text/event-stream")

        async def __aiter__(self) -> AsyncIterator[bytes]:
            try:
                async for chunk in bound_stream(self._stream, self._events):
                    yield chunk
            except OverflowError as error:
                raise httpx.ReadError(str(error), request=self._request) from None

        async def aclose(self) -> None:
            await self._stream.aclose()

    return BoundedTransport


async def bound_stream(stream: AsyncIterable[bytes], events: bool) -> AsyncIterator[bytes]:
    """Yield the chunks of a stream, and raise once they exceed the size limit.

    Args:
        events: whether the stream consists of server-sent events, each of which may have MAX_BYTES.

    Raises:
        OverflowError: the stream, or an event of it, is longer than MAX_BYTES.
    """
    size = 0  # bytes so far, of the stream or of the event that is being received
    tail = b""  # the end of the chunk before: a blank line of up to 4 bytes may be split between two chunks
    async for chunk in stream:
        size += len(chunk)
        if events:
            text = tail + chunk
            for blank in _BLANK.finditer(text):
                size = len(text) - blank.end()
            tail = text[-3:]
        if size > MAX_BYTES:
            raise OverflowError(f"the response is longer than {MAX_BYTES} bytes")
        yield chunk
