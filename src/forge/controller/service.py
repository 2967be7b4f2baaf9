"""A component as its callers see it: `await policy.generate.route(prompt)`, `await policy.update_weights.fanout(3)`.

The verbs: `route` sends to one replica (the least loaded, or the session's), `fanout` to every replica, `call` to
every rank of a component that has one replica, `call_one` to a component of one process. A replica of several
processes runs a routed call on every rank; rank 0's value is the answer.
"""

from __future__ import annotations

import asyncio
import contextvars
import difflib
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from .errors import ForgeError, ReplicaDied, ServiceStopped
from .replica import Replica

_session: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("forge_sessions")
_session_ids = itertools.count()


class Service:
    """A handle on the replicas of one component. Made by `Component.options(...).as_service(...)`."""

    def __init__(self, name: str, endpoints: frozenset[str], replicas: list[Replica]) -> None:
        self._name = name
        self._endpoints = endpoints
        self._replicas = replicas
        self._sticky: dict[str, Replica] = {}
        self._stopped = False

    def __getattr__(self, name: str) -> Endpoint:
        if name in self.__dict__.get("_endpoints", ()):
            return Endpoint(self, name)
        near = difflib.get_close_matches(name, self.__dict__.get("_endpoints", ()), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"{self.__dict__.get('_name', 'service')} has no endpoint {name!r}{hint}")

    @asynccontextmanager
    async def session(self, session_id: str | None = None) -> AsyncIterator[str]:
        """Within the block, `route` keeps going to one replica (where it keeps a cache or a conversation)."""
        session_id = session_id or f"{self._name}-{next(_session_ids)}"
        token = _session.set({**_session.get({}), self._name: session_id})
        try:
            yield session_id
        finally:
            _session.reset(token)
            self._sticky.pop(session_id, None)

    def status(self) -> list[dict[str, Any]]:
        """One row a replica: its name, pids, whether it is up, calls in flight and calls answered."""
        return [
            {
                "replica": str(replica),
                "pids": replica.pids,
                "up": not replica.failed.done(),
                "in_flight": replica.in_flight,
                "served": replica.served,
            }
            for replica in self._replicas
        ]

    async def stop(self) -> None:
        """Stop every replica. Later calls raise ServiceStopped."""
        self._stopped = True
        await asyncio.gather(*(replica.stop() for replica in self._replicas))

    def _pick(self) -> Replica:
        alive = self._alive()
        session = _session.get({}).get(self._name)
        if session is None:
            return _least_loaded(alive)
        replica = self._sticky.get(session)
        if replica is None or replica not in alive:
            replica = self._sticky[session] = _least_loaded(alive)
        return replica

    def _alive(self) -> list[Replica]:
        if self._stopped:
            raise ServiceStopped(f"{self._name} was stopped")
        alive = [replica for replica in self._replicas if not replica.failed.done()]
        if not alive:
            raise ReplicaDied(f"no replica of {self._name} is alive: {self._replicas[-1].failed.result()}")
        return alive


class Endpoint:
    """One endpoint of a service, to be sent with one of the verbs."""

    __slots__ = ("_name", "_service")

    def __init__(self, service: Service, name: str) -> None:
        self._service = service
        self._name = name

    async def route(self, *args: Any, **kwargs: Any) -> Any:
        """Send to one replica and return its answer."""
        return (await self._service._pick().call(self._name, args, kwargs))[0]

    async def fanout(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Send to every replica; one answer each, in replica order. Raises if any replica fails."""
        replicas = self._service._replicas
        self._service._alive()
        answers = await asyncio.gather(*(replica.call(self._name, args, kwargs) for replica in replicas))
        return [values[0] for values in answers]

    async def call(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Send to every rank of a component with one replica; one value each, in rank order."""
        self._service._alive()
        replicas = self._service._replicas
        if len(replicas) != 1:
            raise ForgeError(
                f"call addresses one actor mesh and {self._service._name} has {len(replicas)} replicas: "
                "use route (one replica) or fanout (all)"
            )
        return await replicas[0].call(self._name, args, kwargs)

    async def call_one(self, *args: Any, **kwargs: Any) -> Any:
        """Send to a component of one process."""
        values = await self.call(*args, **kwargs)
        if len(values) != 1:
            raise ForgeError(f"call_one needs one process and {self._service._name} has {len(values)}: use call")
        return values[0]


def _least_loaded(replicas: list[Replica]) -> Replica:
    return min(replicas, key=lambda replica: (replica.in_flight, replica.served))
