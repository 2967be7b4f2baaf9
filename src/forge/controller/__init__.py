"""Actors and services on Monarch. Knows processes and messages, nothing of reinforcement learning."""

from .actor import ForgeActor, endpoint
from .context import ActorContext
from .errors import CallTimeout, ForgeError, RemoteError, ReplicaDied, ServiceStopped
from .options import Options
from .runtime import run, runtime, shutdown
from .service import Service

__all__ = [
    "ActorContext",
    "CallTimeout",
    "ForgeActor",
    "ForgeError",
    "Options",
    "RemoteError",
    "ReplicaDied",
    "Service",
    "ServiceStopped",
    "endpoint",
    "run",
    "runtime",
    "shutdown",
]
