"""Against servers of the `mcp` package itself."""

import asyncio
import sys
from pathlib import Path

import pytest

from forge_envs import InfrastructureError, ToolError
from forge_envs.mcp import HTTPTools

pytestmark = pytest.mark.processes

pytest.importorskip("mcp")
SERVER = [sys.executable, str(Path(__file__).parent / "sdk_server.py")]


async def test_mcp_sdk_streamable_http_server_tools_can_be_called(unused_port):
    program = await asyncio.create_subprocess_exec(*SERVER, "streamable-http", str(unused_port))
    tools = HTTPTools(f"http://127.0.0.1:{unused_port}/mcp")
    for _ in range(200):
        try:
            await tools.open()
            break
        except InfrastructureError:
            await asyncio.sleep(0.1)
    await _use(tools)
    await tools.open()
    program.kill()
    await program.wait()
    with pytest.raises(InfrastructureError):
        await tools.call("add", {"a": 1, "b": 2})


async def _use(tools):
    async with tools:
        assert [schema["function"]["name"] for schema in tools.schemas()] == ["add", "fail", "picture", "wait"]
        assert tools.schemas()[0]["function"]["parameters"]["required"] == ["a", "b"]
        calls = [tools.call("add", {"a": n, "b": 1}) for n in range(20)]
        assert await asyncio.gather(*calls) == [str(n + 1) for n in range(20)]
        assert await tools.call("picture", {}) == "here\n[image, image/png, not shown]"
        with pytest.raises(ToolError, match=r"no luck|Error executing tool fail"):
            await tools.call("fail", {})
        with pytest.raises(ToolError, match="validation error"):
            await tools.call("add", {"a": "x"})
        with pytest.raises(ToolError, match="Unknown tool"):
            await tools.call("nothing", {})
        tools._timeout = 0.3
        with pytest.raises(ToolError, match=r"took more than 0\.3 s"):
            await tools.call("wait", {"seconds": 1.0})
        tools._timeout = 30.0
        assert await tools.call("add", {"a": 1, "b": 2}) == "3"


@pytest.fixture
def unused_port():
    import socket

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]
