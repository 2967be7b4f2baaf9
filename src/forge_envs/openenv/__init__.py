"""Environments behind OpenEnv's wire format: its servers used as environments, and environments served to its clients.

None of it needs the `openenv` package. It needs aiohttp: pip install 'torchforge[openenv]'.
"""

try:
    import aiohttp as _aiohttp  # noqa: F401
except ImportError as error:
    raise ImportError("OpenEnv needs aiohttp: pip install 'torchforge[openenv]'") from error

from .client import CapacityError, OpenEnvClient, OpenEnvError, Reply, Session
from .environment import OpenEnvEnvironment
from .launch import LocalServer
from .server import serve, web_app

__all__ = [
    "CapacityError",
    "LocalServer",
    "OpenEnvClient",
    "OpenEnvEnvironment",
    "OpenEnvError",
    "Reply",
    "Session",
    "serve",
    "web_app",
]
