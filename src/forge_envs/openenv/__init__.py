"""OpenEnv servers as environments, and environments served to OpenEnv clients.

Needs aiohttp (pip install aiohttp), not the `openenv` package.
"""

try:
    import aiohttp as _aiohttp  # noqa: F401
except ImportError as error:
    raise ImportError("OpenEnv needs aiohttp: pip install aiohttp") from error

from .client import CapacityError, LocalServer, OpenEnvClient, OpenEnvError, Session
from .environment import OpenEnvEnvironment, OpenEnvVerifier
from .server import serve, web_app
from .wire import Reply

__all__ = [
    "CapacityError",
    "LocalServer",
    "OpenEnvClient",
    "OpenEnvEnvironment",
    "OpenEnvError",
    "OpenEnvVerifier",
    "Reply",
    "Session",
    "serve",
    "web_app",
]
