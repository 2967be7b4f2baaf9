"""Servers that answer with anything: clients of MCP and OpenEnv take a bounded amount, and raise one kind of error."""

import asyncio
import gzip
import json
import re
import tracemalloc

import pytest

from forge_envs.environment import InfrastructureError
from forge_envs.openenv import OpenEnvClient
from forge_envs.openenv.client import OpenEnvError
from forge_http.bounded_http import MAX_BYTES, bound_stream, bounded_transport

mcp = pytest.importorskip("forge_envs.mcp")

DEEP = "[" * 100_000
INIT = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}}


def answered(body: bytes, *headers: str, status: str = "200 OK", kind: str = "application/json") -> bytes:
    lines = [
        f"HTTP/1.1 {status}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        *headers,
        "Connection: close",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Scripted:
    """An HTTP server whose `answer(method, path, headers, body)` gives the bytes to send."""

    def __init__(self, answer) -> None:
        self.answer, self.requests = answer, []

    async def __aenter__(self) -> str:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_) -> None:
        self.server.close()

    async def serve(self, reader, writer) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1")
            length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
            body = await reader.readexactly(int(length[1])) if length else b""
            self.requests.append(head)
            method, path, _ = head.split(" ", 2)
            writer.write(self.answer(method, path, head, body))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def mcp_server(tools=None, result=None, call=None):
    """A server that is in order up to what is given in the place of an answer."""

    def answer(method: str, _: str, __: str, body: bytes) -> bytes:
        if method != "POST":
            return answered(b"", status="405 Method Not Allowed")
        message = json.loads(body)
        if "id" not in message:
            return answered(b"", status="202 Accepted")
        plain = {"initialize": INIT, "tools/list": tools or {"tools": []}, "tools/call": result or {"content": []}}
        if message["method"] == "tools/call" and call is not None:
            return call(message["id"])
        return answered(
            json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": plain[message["method"]]}).encode()
        )

    return Scripted(answer)


BOMB = gzip.compress(b" " * (200 << 20), 1)
CALLS = {
    "a gzip bomb": lambda _: answered(BOMB, "Content-Encoding: gzip"),
    "a long answer": lambda _: answered(b'"' + b"x" * (MAX_BYTES + 9) + b'"'),
    "a long event": lambda _: answered(b"data: " + b"x" * (MAX_BYTES + 9), kind="text/event-stream"),
    "a compressed event": lambda _: answered(BOMB, "Content-Encoding: gzip", kind="text/event-stream"),
    "a long error": lambda _: answered(b"x" * (MAX_BYTES + 9), status="500 Broken"),
    "no object": lambda _: answered(b"[1, 2]"),
    "a number": lambda _: answered(b"3"),
    "deep": lambda _: answered(DEEP.encode()),
    "deep inside": lambda i: answered(
        b'{"jsonrpc": "2.0", "id": %d, "result": {"content": [], "structuredContent": {"a": %s%s}}}'
        % (i, b"[" * 900, b"]" * 900)
    ),
    "another shape": lambda i: answered(json.dumps({"jsonrpc": "2.0", "id": i, "result": {"content": 3}}).encode()),
    "elsewhere": lambda _: answered(b"", "Location: http://127.0.0.1:1/mcp", status="307 Temporary Redirect"),
}


@pytest.mark.parametrize("name", CALLS)
def test_hostile_mcp_response_raises_within_memory_bound(name: str):
    async def main():
        async with (
            mcp_server(call=CALLS[name]) as url,
            mcp.HTTPTools(url, headers={"X-Api-Key": "secret"}, timeout=500.0) as tools,
        ):
            with pytest.raises((InfrastructureError, mcp.ToolError)) as caught:
                await tools.call("add", {})
            assert len(str(caught.value)) < 2000

    tracemalloc.start()
    asyncio.run(main())
    assert tracemalloc.get_traced_memory()[1] < 8 * MAX_BYTES
    tracemalloc.stop()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_mcp_server_sent_event_size_is_bounded(end: str):
    line, size = f"data: {'a' * 60_000}{end}".encode(), 1 << 14

    async def taken(stream: bytes) -> int:
        async def chunks():
            for at in range(0, len(stream), size):
                yield stream[at : at + size]

        return sum([len(chunk) async for chunk in bound_stream(chunks(), events=True)])

    many = MAX_BYTES // len(line) + 2
    assert asyncio.run(taken((line + end.encode()) * many)) > MAX_BYTES
    with pytest.raises(OverflowError, match="longer than"):
        asyncio.run(taken(line * many))


@pytest.mark.parametrize(
    "body",
    [b"[1]", b"3", b"{", DEEP.encode(), b"\xff\xfe"],
)
async def test_hostile_openenv_response_raises_infrastructure_error(body: bytes):
    async with Scripted(lambda *_: answered(body)) as url, OpenEnvClient(url) as client:
        with pytest.raises((InfrastructureError, OpenEnvError)):
            await client.schema()


@pytest.mark.parametrize("library", ["httpx", "httpx2"])  # the second is what newer clients of LM judges use
@pytest.mark.parametrize("name", ["a gzip bomb", "a long answer", "a long event", "a compressed event"])
async def test_bounded_http_transport_rejects_oversized_responses(library: str, name: str):
    httpx = pytest.importorskip(library)

    async with (
        Scripted(lambda *_: CALLS[name](1)) as url,
        httpx.AsyncClient(transport=bounded_transport(httpx)()) as client,
    ):
        with pytest.raises(httpx.ReadError, match=r"compressed|longer than"):
            await client.post(url, json={})
