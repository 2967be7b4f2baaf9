"""Whatever an MCP server answers, a call gives a text, a ToolError or an InfrastructureError."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.envs import InfrastructureError
from forge_envs.mcp import HTTPTools, ToolError
from tests.data.test_fuzz import objects, texts, values

pytestmark = pytest.mark.costly

BLOCK = objects("type", "text", "resource", "uri", "mimeType", type=st.sampled_from(["text", "resource", "image", "x"]))
RESULT = objects("content", "isError", "structuredContent", "tools", "nextCursor", content=st.lists(BLOCK, max_size=3))
TOOL = objects("name", "description", "inputSchema", "input_schema")
LISTED = st.fixed_dictionaries({"tools": st.lists(TOOL | values, max_size=3) | values})
# "ID" is replaced by the number of the request.
ANSWER = st.one_of(
    texts,
    values.map(json.dumps),
    st.just("[" * 100_000),
    st.fixed_dictionaries({"jsonrpc": st.just("2.0"), "id": st.just("ID")}, optional={"result": RESULT | values}).map(
        json.dumps
    ),
    st.fixed_dictionaries(
        {"jsonrpc": st.just("2.0"), "id": st.just("ID"), "error": objects("code", "message", "data") | values}
    ).map(json.dumps),
)
VALID = {"tools": [{"name": "add", "description": "", "inputSchema": {"type": "object"}}]}
INITIAL = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}}


@settings(max_examples=max(5, settings.default.max_examples // 5))  # each starts a server and a client
@given(
    answers=st.lists(ANSWER, min_size=1, max_size=5),
    listed=st.just(VALID) | LISTED,
    status=st.sampled_from([200, 200, 400, 500]),
)
def test_any_answer_of_a_server(answers, listed, status):
    left = list(answers)

    async def answer(request):
        asked = await request.json()
        if "id" not in asked:
            return web.Response(status=202)
        known = {"initialize": INITIAL, "tools/list": listed}
        if asked["method"] in known:
            return web.json_response({"jsonrpc": "2.0", "id": asked["id"], "result": known[asked["method"]]})
        text = (left.pop() if left else "{}").replace('"ID"', str(asked["id"])).encode("utf-8", "replace")
        return web.Response(body=text, status=status, content_type="application/json")

    async def main():
        app = web.Application()
        app.router.add_post("/mcp", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        tools = HTTPTools(f"http://127.0.0.1:{port}/mcp", timeout=0.2, start_timeout=10.0)
        try:
            await tools.open()
            for _ in answers:
                try:
                    assert isinstance(await tools.call("add", {"a": 1}), str)
                except ToolError as error:
                    said = str(error)
                    assert isinstance(said, str)
        except InfrastructureError as error:
            said = str(error)
            assert said
        finally:
            await tools.close()
            await runner.cleanup()

    asyncio.run(main())
