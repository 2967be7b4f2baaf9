"""MCP over standard input and output, against a server written by hand."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("mcp")

from forge_envs import InfrastructureError, ToolError
from forge_envs.mcp import StdioTools

pytestmark = pytest.mark.processes
SERVER = Path(__file__).parent / "tool_server.py"


def with_tools(work, *how, **settings):
    async def main():
        async with StdioTools([sys.executable, "-S", str(SERVER), *how], **settings) as tools:
            return await work(tools)

    return asyncio.run(main())


def test_concurrent_mcp_stdio_calls_return_matching_results():
    async def work(tools):
        names = [schema["function"]["name"] for schema in tools.schemas()]
        assert names == ["add", "fail", "slow", "crash", "big", "hang", "blocks", "pid", "ask"]
        assert tools.schemas()[0]["function"]["parameters"]["required"] == ["a"]
        assert tools.schemas()[0]["type"] == "function"
        calls = [tools.call("slow", {"a": 2}), *(tools.call("add", {"a": n, "b": 1}) for n in range(50))]
        assert await asyncio.gather(*calls) == ["slept 2", *(str(n + 1) for n in range(50))]
        assert await tools.call("blocks", {}) == (
            "seen\n[image, image/png, not shown]\ninside\n[resource file:///b: b]"
        )
        assert await tools.call("big", {"a": 3_000_000}) == "x" * 3_000_000
        assert await tools.call("ask", {}) == "Sampling not supported"
        with pytest.raises(ToolError, match="a must not be 0"):
            await tools.call("fail", {})
        with pytest.raises(ToolError, match="Unknown tool: dance"):
            await tools.call("dance", {})

    with_tools(work)


def test_timed_out_mcp_stdio_call_keeps_server_running():
    async def work(tools):
        before = await tools.call("pid", {})
        with pytest.raises(ToolError, match=r"slow took more than 1 s"):
            await tools.call("slow", {"a": 13})
        await asyncio.sleep(0.5)  # its answer comes, and is nobody's
        assert await tools.call("add", {"a": 1, "b": 2}) == "3"
        assert await tools.call("pid", {}) == before

    with_tools(work, timeout=1.0)


@pytest.mark.parametrize("kill", [False, True])
def test_dead_mcp_stdio_server_raises_and_is_restarted(kill):
    async def work(tools):
        pid = int(await tools.call("pid", {}))
        if kill:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(
            InfrastructureError, match="Connection closed" if kill else "Connection closed(.|\n)*out of luck"
        ):
            await tools.call("add" if kill else "crash", {"a": 1, "b": 2})
        assert await tools.call("pid", {}) != str(pid)

    with_tools(work)


def test_invalid_mcp_settings_raise():
    with pytest.raises(InfrastructureError, match="there-is-no-such-server: No such file"):
        asyncio.run(StdioTools(["there-is-no-such-server"]).open())
    with pytest.raises(ValueError, match="a list of a program and its arguments"):
        StdioTools("python server.py")
    with pytest.raises(RuntimeError, match="call `await open"):
        StdioTools(["python"]).schemas()
