"""Actors and services on Monarch. Knows processes and messages, nothing of reinforcement learning."""

from .actor import ForgeActor, endpoint
from .context import ActorContext, request_id
from .errors import (
    CallTimeout,
    ForgeError,
    PoisonRequest,
    RemoteError,
    ReplicaDied,
    ServiceStopped,
    Unrecoverable,
)
from .options import Options
from .runtime import drain_metrics, first_to_end, run, runtime, shutdown
from .service import Service

__all__ = [
    "ActorContext",
    "CallTimeout",
    "ForgeActor",
    "ForgeError",
    "Options",
    "PoisonRequest",
    "RemoteError",
    "ReplicaDied",
    "Service",
    "ServiceStopped",
    "Unrecoverable",
    "drain_metrics",
    "endpoint",
    "first_to_end",
    "request_id",
    "run",
    "runtime",
    "shutdown",
]
