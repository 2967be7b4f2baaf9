"""Actors and services on Monarch. Knows processes and messages, nothing of reinforcement learning."""

from .actor import ForgeActor, endpoint
from .context import ActorContext
from .errors import CallTimeout, ForgeError, RemoteError, ReplicaDied, ServiceStopped
from .options import Options
from .runtime import drain_metrics, first_to_end, run, runtime, shutdown
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
    "drain_metrics",
    "endpoint",
    "first_to_end",
    "run",
    "runtime",
    "shutdown",
]
