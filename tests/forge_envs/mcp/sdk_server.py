"""A server of the `mcp` package: python sdk_server.py stdio | streamable-http PORT"""

import asyncio
import sys

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("tools")


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


server.run(transport=sys.argv[1], **({"port": int(sys.argv[2])} if len(sys.argv) > 2 else {}))
