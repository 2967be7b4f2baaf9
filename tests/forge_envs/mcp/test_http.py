"""MCP over HTTP, against a server written by hand that answers as JSON or as events."""

import asyncio
import json

import pytest

pytest.importorskip("mcp")
from aiohttp import web

from forge_envs import InfrastructureError, ToolError
from forge_envs.mcp import HTTPTools


class Server:
    """`sessions` are those that it still knows, `unknown` is what it says of others."""

    unknown = 404

    def __init__(self, events):
        self.events, self.sessions, self.deleted, self.pongs = events, set(), [], []

    async def answer(self, request):
        message = await request.json()
        session, method = request.headers.get("Mcp-Session-Id"), message.get("method")
        if method == "initialize":
            session = f"s{len(self.sessions)}"
            self.sessions.add(session)
            result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
            result["serverInfo"] = {"name": "s", "version": "1"}
            return await self.say(request, message["id"], result, {"Mcp-Session-Id": session})
        if session not in self.sessions:
            return web.Response(text="No valid session ID", status=self.unknown)
        if method == "tools/call":
            assert request.headers["MCP-Protocol-Version"] == "2025-06-18"
        if method is None:
            self.pongs.append(message)
        if "id" not in message or method is None:
            return web.Response(status=202)
        if method == "tools/list":
            return await self.say(
                request, message["id"], {"tools": [{"name": "add", "inputSchema": {"type": "object"}}]}
            )
        arguments = message["params"]["arguments"]
        if "sleep" in arguments:
            await asyncio.sleep(arguments["sleep"])
        if "status" in arguments:
            return web.Response(status=arguments["status"], text="slow down")
        if "refuse" in arguments:
            error = {"code": -32602, "message": "no such city"}
            return web.json_response({"jsonrpc": "2.0", "id": message["id"], "error": error}, status=400)
        if "junk" in arguments:
            return web.Response(text="<html>", content_type="application/json")
        if "cut" in arguments:
            return web.Response(status=200)
        if "raw" in arguments:
            text = arguments["raw"].replace("NUMBER", str(message["id"]))
            text = f"data: {text}\n\n" if self.events and text else text
            return web.Response(text=text, content_type=f"{'text/event-stream' if self.events else 'application/json'}")
        said = {"content": [{"type": "text", "text": "é" * arguments.get("long", 1)}]}
        return await self.say(request, message["id"], {**said, "isError": "bad" in arguments})

    async def say(self, request, number, result, headers=None):
        reply = {"jsonrpc": "2.0", "id": number, "result": result}
        if not self.events:
            return web.json_response(reply, headers=headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **(headers or {})})
        await response.prepare(request)
        ping = json.dumps({"jsonrpc": "2.0", "id": "p", "method": "ping"})
        told = json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}})
        text = f": hello\r\n\r\nid: 1\r\ndata:\r\n\r\ndata: {told}\r\n\r\n"
        text += f"event: message\r\ndata: {ping}\r\n\r\ndata: {json.dumps(reply)}\r\n\r\n"
        data = text.encode() if self.sessions else b""
        for at in range(0, len(data), 70_001):  # in pieces that end anywhere
            await response.write(data[at : at + 70_001])
        return response

    async def forget(self, request):
        self.deleted.append(request.headers["Mcp-Session-Id"])
        return web.Response()


def with_tools(work, events=False, **settings):
    async def main():
        server = Server(events)
        app = web.Application()
        app.add_routes([web.post("/mcp", server.answer), web.delete("/mcp", server.forget)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            url = "http://{}:{}/mcp".format(*runner.addresses[0][:2])
            async with HTTPTools(url, **settings) as tools:
                return await work(tools, server)
        finally:
            await runner.cleanup()

    return asyncio.run(main())


@pytest.mark.parametrize("events", [False, True])
def test_mcp_http_tool_calls_return_results_and_errors(events):
    async def work(tools, server):
        assert [schema["function"]["name"] for schema in tools.schemas()] == ["add"]
        said = await asyncio.gather(*(tools.call("add", {"long": n}) for n in (1, 2, 3)))
        assert said == ["é", "éé", "ééé"]
        assert await tools.call("add", {"long": 400_000}) == "é" * 400_000
        with pytest.raises(ToolError, match="é"):
            await tools.call("add", {"bad": True})
        await tools.close()
        assert server.deleted == ["s0"]
        assert len(server.pongs) == (7 if events else 0)
        assert await tools.call("add", {}) == "é"  # which opens it again

    with_tools(work, events)


def test_rejected_mcp_http_call_does_not_affect_other_calls():
    async def work(tools, server):
        other = asyncio.create_task(tools.call("add", {"sleep": 0.3}))
        await asyncio.sleep(0.1)
        with pytest.raises(ToolError, match="no such city"):
            await tools.call("add", {"refuse": True})
        assert await other == "é"
        assert server.sessions == {"s0"}
        for status in (400, 429, 500):
            with pytest.raises(InfrastructureError, match="Server returned an error response"):
                await tools.call("add", {"status": status})
        assert await tools.call("add", {}) == "é"

    with_tools(work)


@pytest.mark.parametrize("bad", ["junk", "cut"])
def test_invalid_mcp_responses_raise(bad):
    async def work(tools, server):
        with pytest.raises(InfrastructureError, match=r"Failed to parse JSON|Unexpected content type"):
            await tools.call("add", {bad: True})
        assert await tools.call("add", {}) == "é"

    with_tools(work)


@pytest.mark.parametrize("status", [404, 400])
def test_expired_mcp_session_is_reopened_by_next_call(status):
    async def work(tools, server):
        server.sessions, server.unknown = {"another"}, status
        with pytest.raises(InfrastructureError, match=r"Session terminated|error response"):
            await tools.call("add", {})
        assert await tools.call("add", {}) == "é"

    with_tools(work)
