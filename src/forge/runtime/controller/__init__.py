"""Actors and services on Monarch. Knows processes and messages, nothing of reinforcement learning."""

from .actor import ForgeActor, endpoint
from .actor_host import ActorHost  # noqa: F401  (processes find it by this name)
from .errors import CallTimeout, ForgeError, PoisonRequest, RemoteError, ReplicaDied, ServiceStopped, Unrecoverable
from .handle import Local
from .options import Options, Placement, ServiceConfig
from .run import first_to_end, run, run_in_thread
from .runtime import drain_metrics, forked_processes, runtime, shutdown
from .service import ReplicaStatus, Service, ServiceStatus
from .types import ActorContext, request_id

__all__ = [
    "ActorContext",
    "CallTimeout",
    "ForgeActor",
    "ForgeError",
    "Local",
    "Options",
    "Placement",
    "PoisonRequest",
    "RemoteError",
    "ReplicaDied",
    "ReplicaStatus",
    "Service",
    "ServiceConfig",
    "ServiceStatus",
    "ServiceStopped",
    "Unrecoverable",
    "drain_metrics",
    "endpoint",
    "first_to_end",
    "forked_processes",
    "request_id",
    "run",
    "run_in_thread",
    "runtime",
    "shutdown",
]
