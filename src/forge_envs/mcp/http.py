"""An MCP server over streamable HTTP: a request for each message, answered by JSON or by a stream of events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

from forge.envs.environment import InfrastructureError

from .client import Data, MCPTools, TookTooLong, reply_to, result_of

if TYPE_CHECKING:
    import aiohttp

LONGEST = 64 << 20  # bytes of one answer
_GOODBYE = 2.0  # seconds for telling a server that a session ends


class HTTPTools(MCPTools):
    """The tools of a server over HTTP. It belongs to the event loop in which it is opened.

    Args:
        url: of its endpoint, such as http://127.0.0.1:8000/mcp.
        headers: sent with every request, such as an authorization.
        timeout: seconds for one call.
        start_timeout: seconds for each step of the beginning.

    Raises:
        ValueError: a setting that cannot be. ImportError: aiohttp is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        start_timeout: float = 30.0,
    ) -> None:
        try:
            import aiohttp  # noqa: F401
        except ImportError as error:
            raise ImportError("MCP over HTTP needs aiohttp: pip install 'torchforge[mcp]'") from error
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"the url of an MCP server must begin with http:// or https://, got {url!r}")
        super().__init__(url, timeout, start_timeout)
        self._headers = {**(headers or {}), "Accept": "application/json, text/event-stream"}
        self._http: aiohttp.ClientSession | None = None
        self._session = ""

    @property
    def connected(self) -> bool:
        return self._http is not None

    async def close(self) -> None:
        """End the session, if the server can still be told so."""
        import aiohttp

        http, self._http = self._http, None
        session, self._session = self._session, ""
        if http is None:
            return
        try:
            if session:
                with suppress(aiohttp.ClientError, OSError):  # it is gone, and its session with it
                    limit = aiohttp.ClientTimeout(total=_GOODBYE)
                    await http.delete(self.name, headers=self._with_session(session), timeout=limit)
        finally:
            await http.close()

    async def _connect(self) -> None:
        import aiohttp

        self.version = ""
        self._http = aiohttp.ClientSession(headers=self._headers, read_bufsize=1 << 20)

    async def _request(self, method: str, params: Data, limit: float) -> Data:
        number = next(self._numbers)
        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        async with aclosing(self._post(message, limit)) as answers:
            async for answer in answers:
                if answer.get("id") == number and "method" not in answer:
                    return result_of(answer)
                if "method" in answer and "id" in answer:
                    async for _ in self._post(reply_to(answer), limit):
                        pass
        raise InfrastructureError(f"{self.name} did not answer {method}")

    async def _notify(self, method: str, params: Data) -> None:
        async for _ in self._post({"jsonrpc": "2.0", "method": method, "params": params}, self._start_timeout):
            pass

    async def _post(self, message: Data, limit: float) -> AsyncGenerator[Data]:
        """Every message that the server sends back. What cannot be sent or read is an InfrastructureError.

        Only the loss of the session or of a connection ends the session: other calls are made in it at the same time.
        """
        import aiohttp

        http = self._http
        if http is None:
            raise InfrastructureError(f"{self.name} was closed")
        headers, within = self._with_session(self._session), aiohttp.ClientTimeout(total=limit)
        try:
            async with http.post(self.name, json=message, headers=headers, timeout=within) as response:
                self._session = response.headers.get("Mcp-Session-Id", self._session)
                if response.status >= 400:
                    said = await response.text()
                    why = f"{self.name} answered with status {response.status}: {said[:500]}"
                    # Of a session that it does not know a server says 404, or 400 in many an implementation.
                    if response.status == 404 or (response.status == 400 and "session" in said.lower()):
                        raise await self._gone(why, http)
                    if (refused := _refusal(said, message.get("id"))) is None:
                        raise InfrastructureError(why)
                    yield refused
                    return
                if response.content_type == "text/event-stream":
                    async for event in _events(response.content):
                        yield event
                elif response.status == 200 and (body := await response.read()):
                    yield json.loads(body)
        except TimeoutError:
            raise TookTooLong from None
        except (aiohttp.ClientError, OSError) as error:
            raise await self._gone(f"{self.name}: {error}", http) from error
        except ValueError as error:
            raise InfrastructureError(f"{self.name} answered with no JSON: {error}") from error

    async def _gone(self, why: str, http: aiohttp.ClientSession) -> InfrastructureError:
        if self._http is http:  # else another call has found it out, and there may be a new session
            await self.close()
        return InfrastructureError(why)

    def _with_session(self, session: str) -> dict[str, str]:
        version = {"MCP-Protocol-Version": self.version} if self.version else {}
        return {**version, **({"Mcp-Session-Id": session} if session else {})}


def _refusal(text: str, number: Any) -> Data | None:
    """The JSON-RPC error that answers this request, if the text is one."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return None
    mine = isinstance(answer, dict) and number is not None and answer.get("id") == number
    return answer if mine and answer.get("error") is not None else None


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[Data]:
    """The JSON of server-sent events. ValueError: an event has none, or is too long."""
    data: list[bytes] = []
    size = 0
    async for line in _lines(stream):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
            size += len(line)
        elif not line and data:
            if text := b"\n".join(data).strip():
                yield json.loads(text)
            data, size = [], 0
        if size > LONGEST:
            raise ValueError(f"an event of more than {LONGEST >> 20} MB")


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Without their ends. Unlike the stream's own lines they may be of any length up to LONGEST."""
    rest = bytearray()
    async for chunk in stream.iter_any():
        rest += chunk
        *lines, last = rest.split(b"\n") if b"\n" in chunk else [rest]
        for line in lines:
            yield bytes(line.rstrip(b"\r"))
        rest = bytearray(last)
        if len(rest) > LONGEST:
            raise ValueError(f"a line of more than {LONGEST >> 20} MB")
    yield bytes(rest)
