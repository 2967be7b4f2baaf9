"""A server of the `mcp` package: python sdk_server.py stdio | streamable-http PORT"""

import asyncio
import sys

try:
    from mcp.server.fastmcp import FastMCP as Server
    from mcp.server.fastmcp import Image
except ModuleNotFoundError:  # version 2
    from mcp.server.mcpserver import Image
    from mcp.server.mcpserver import MCPServer as Server

PORT = {"port": int(sys.argv[2])} if len(sys.argv) > 2 else {}
IS_FIRST = Server.__name__ == "FastMCP"
server = Server("tools", **(PORT if IS_FIRST else {}))


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    raise ValueError("no luck")


@server.tool(structured_output=False)
def picture() -> list:
    return ["here", Image(data=b"x", format="png")]


@server.tool()
async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "waited"


server.run(transport=sys.argv[1], **({} if IS_FIRST else PORT))
