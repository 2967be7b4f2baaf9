"""Methods that services and endpoints have in Meta's torchforge.

`Handle` and `Endpoint` find them by the entry points `forge.verbs`, but only for names that they do not have: a
component may have its own endpoint `get_metrics`.
"""

from typing import Any, Protocol
from uuid import uuid4

from forge.runtime.controller.types import Value
from forge_compat.setting_names import ENDPOINTS


class Callee(Protocol):
    """The attributes of a service that these methods need."""

    _name: str

    def _end_session(self, session: str) -> None: ...


async def start_session(service: Callee) -> str:
    """Return the id of a new session: calls of `route(..., sess_id=id)` go to one replica until `terminate_session`."""
    return f"{service._name}-{uuid4().hex}"


async def terminate_session(service: Callee, sess_id: str) -> None:
    """End a session: its calls may go to any replica again."""
    service._end_session(sess_id)


async def call_all(service: Callee, endpoint: str, *args: object, **kwargs: object) -> list[Value]:
    """Call an endpoint, by its name, on every replica; return the value of each."""
    values: list[Value] = await getattr(service, endpoint).fanout(*args, **kwargs)
    return values


async def get_metrics(service: Callee) -> Any:
    """Return the `ServiceStatus` of a service. TypeError: this process is not the controller, which has it."""
    # The attribute of the class: on an instance, `status` may be an endpoint of the component.
    status = getattr(type(service), "status", None)
    if status is None:
        raise TypeError(f"{service._name}.get_metrics is for the controller, which started the service: call it there")
    return status(service)


async def get_metrics_summary(service: Callee) -> dict[str, dict[Any, Any]]:
    """Return the status of a service as dicts: `summary["service"]["healthy_replicas"]`, and by the replica's number
    `summary["replicas"][0]["total_requests"]`.

    Latencies are in milliseconds, NaN before the first call.
    """
    status = await get_metrics(service)
    replicas = {
        index: {
            "total_requests": row.served,
            "active_requests": row.in_flight,
            "latency_p50": row.latency_p50,
            "latency_p99": row.latency_p99,
            "healthy": row.state == "up",
            "restarts": row.restarts,
        }
        for index, row in enumerate(status.replicas)
    }
    totals = {
        "total_replicas": len(replicas),
        "healthy_replicas": sum(row["healthy"] for row in replicas.values()),
        "queue_depth": status.queued,
    }

    return {"service": totals, "replicas": replicas}


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
