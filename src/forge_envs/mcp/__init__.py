"""Tools of MCP servers: programs that speak over their standard input and output, and servers over HTTP.

    tools = StdioTools(["python", "server.py"])
    await tools.open()
    toolbox = Toolbox(servers=[tools])

An object of either kind has `open`, `schemas`, `call` and `close`, as `forge.envs.tools.ToolServer` wants it. HTTP
needs aiohttp: pip install 'torchforge[mcp]'.
"""

from forge.envs.tools import ToolError

from .http import HTTPTools
from .stdio import StdioTools

__all__ = ["HTTPTools", "StdioTools", "ToolError"]
