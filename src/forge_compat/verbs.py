"""Methods that services and endpoints have in Meta's torchforge.

`Handle` and `Endpoint` find them by the entry points `forge.verbs`, but only for names that they do not have: a
component may have its own endpoint `get_metrics`.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from uuid import uuid4

from forge.config.plugin import resolve
from forge.runtime.controller.handle import Handle
from forge.runtime.controller.types import Kwargs, Value
from forge_compat.setting_names import ENDPOINTS

log = logging.getLogger(f"forge.{__name__}")

# Components that both libraries have, and names of arguments that only torchforge's have.
MARKERS = {
    "forge.actors.generator:Generator": {"engine_args", "sampling_params", "engine_config", "sampling_config"},
    "forge.actors.replay_buffer:ReplayBuffer": {"dp_size", "collate"},
    "forge.actors.reference:ReferenceModel": {"training", "checkpoint", "compile", "activation_checkpoint"},
}


async def start_session(service: Handle) -> str:
    """Return the id of a new session: calls of `route(..., sess_id=id)` go to one replica until `terminate_session`."""
    return f"{service._name}-{uuid4().hex}"


async def terminate_session(service: Handle, sess_id: str) -> None:
    """End a session: its calls may go to any replica again."""
    service._end_session(sess_id)


async def call_all(service: Handle, endpoint: str, *args: object, **kwargs: object) -> list[Value]:
    """Call an endpoint, by its name, on every replica; return the value of each."""
    return await getattr(service, endpoint).fanout(*args, **kwargs)


@dataclass(frozen=True)
class ReplicaMetrics:
    """Torchforge's metrics of a replica; latencies in seconds, rates per second.

    Calls wait in a queue of the service here, not of a replica, so that `queue_depth` is 0.
    """

    total_requests: int
    successful_requests: int
    failed_requests: int
    request_rate: float
    avg_latency: float
    active_requests: int
    queue_depth: int
    assigned_sessions: int
    capacity_utilization: float

    def get_request_rate(self) -> float:
        """Return the number of returned values per second in the last minute."""
        return self.request_rate

    def get_avg_latency(self) -> float:
        """Return the mean latency of the last calls in seconds, 0 before the first."""
        return self.avg_latency


@dataclass(frozen=True)
class ServiceMetrics:
    """Torchforge's metrics of a service."""

    replica_metrics: dict[int, ReplicaMetrics]
    total_sessions: int
    healthy_replicas: int
    total_replicas: int
    total_request_rate: float
    avg_queue_depth: float
    avg_capacity_utilization: float
    sessions_per_replica: float

    def get_total_request_rate(self) -> float:
        """Return the number of returned values per second of all replicas in the last minute."""
        return self.total_request_rate

    def get_sessions_per_replica(self) -> float:
        """Return the mean number of sessions of a replica."""
        return self.sessions_per_replica


async def get_metrics(service: Any) -> ServiceMetrics:
    """Return torchforge's metrics of a service. TypeError: this process is not the controller, which counts them."""
    # The attribute of the class: on an instance, `status` may be an endpoint of the component.
    status = getattr(type(service), "status", None)
    if status is None:
        raise TypeError(f"{service._name}.get_metrics is for the controller, which started the service: call it there")
    state = status(service)
    rows = state.replicas
    total_sessions = sum(row.sessions for row in rows)

    replicas = {
        index: ReplicaMetrics(
            total_requests=row.served + row.errors + row.in_flight,
            successful_requests=row.served,
            failed_requests=row.errors,
            request_rate=row.rate,
            avg_latency=row.latency_mean / 1e3 if row.served else 0.0,
            active_requests=row.in_flight,
            queue_depth=0,
            assigned_sessions=row.sessions,
            capacity_utilization=row.in_flight / service._options.max_in_flight,
        )
        for index, row in enumerate(rows)
    }
    healthy = [metrics for row, metrics in zip(rows, replicas.values(), strict=True) if row.state == "up"]
    divisor = max(1, len(healthy))

    return ServiceMetrics(
        replica_metrics=replicas,
        total_sessions=total_sessions,
        healthy_replicas=len(healthy),
        total_replicas=len(rows),
        total_request_rate=sum(row.rate for row in rows),
        avg_queue_depth=state.queued / divisor,
        avg_capacity_utilization=sum(metrics.capacity_utilization for metrics in healthy) / divisor,
        sessions_per_replica=total_sessions / max(1, len(rows)),
    )


async def get_metrics_summary(service: Handle) -> dict[str, dict[Any, Any]]:
    """Return the metrics of a service as dicts: `summary["service"]["healthy_replicas"]`, and by the replica's number
    `summary["replicas"][0]["failed_requests"]`."""
    metrics = await get_metrics(service)
    totals = {name: value for name, value in asdict(metrics).items() if name != "replica_metrics"}
    return {"service": totals, "replicas": {index: asdict(row) for index, row in metrics.replica_metrics.items()}}


class Setup:
    """Endpoint `setup` of torchforge's components: `await actor.setup.call()` only logs that setup has run."""

    def __init__(self, service: Handle) -> None:
        self.name = service._name

    async def call(self) -> None:
        """Do nothing: the start of the component has waited for its `setup`."""
        log.info("%s.setup: nothing to do, it ran when %s was started", self.name, self.name)

    call_one = route = fanout = call


class Mesh:
    """The attribute `mesh` of torchforge's actors, for `await actor.mesh.stop()`."""

    def __init__(self, service: Any) -> None:
        self.stop = service.stop


def convert_component(cls: type, arguments: Kwargs) -> tuple[type, Kwargs]:
    """Return the class and arguments of a component that is started with torchforge's arguments.

    Those of this library are returned as they are. Sections and names that only torchforge has, such as `engine_args`,
    distinguish the two.
    """
    markers: set[str] = MARKERS.get(f"{cls.__module__}:{cls.__qualname__}", set())
    if not (markers & arguments.keys() or (markers and isinstance(arguments.get("model"), Mapping))):
        return cls, arguments
    return resolve("forge_compat.actors:convert_arguments", "component")(cls.__name__, arguments)


async def choose(endpoint: Any, *args: object, sess_id: str | None = None, **kwargs: object) -> Value:
    """Call an endpoint of one replica and return its value, as `route` does."""
    return await endpoint.options(session=sess_id).route(*args, **kwargs)


def hint(name: str) -> str:
    """Return the end of an error on the equivalent of one of torchforge's names; "" if there is none.

    >>> hint("cleanup")
    ": torchforge's cleanup is service.shutdown() here"
    """
    here = ENDPOINTS.get(name)
    return f": torchforge's {name} is {here} here" if here else ""
