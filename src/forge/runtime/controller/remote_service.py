"""Services inside other actors: a handle that sends each call to the controller, which routes it as its own.

One process decides where calls go, so that balance, sessions and quarantine are exact for all callers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...observability.metrics import PROCESS_NAME
from ._monarch import Actor, concurrent_endpoint, this_proc
from .errors import CallTimeout, RemoteFailure, ServiceStopped
from .handle import Call, Handle
from .request import new_id

if TYPE_CHECKING:
    from .service import Service

# Seconds that a call may take beyond its own limit before the controller counts as unreachable.
GRACE = 15.0

_find: Callable[[str], Service] | None = None
_loop: asyncio.AbstractEventLoop | None = None
_relay: Any = None


class Relay(Actor):
    """Lives in the controller's process; takes calls on behalf of other actors."""

    def __init__(self) -> None:
        self._calls: dict[str, asyncio.Future[Any]] = {}

    @concurrent_endpoint
    async def dispatch(self, call_id: str, service: str, call: Call, where: str) -> Any:
        """Make a call of a service in the controller's process, for a caller in another."""

        async def here() -> Any:
            if _find is None:
                raise ServiceStopped(f"{service} cannot be called: its run is over")
            return await _find(service)._dispatch(call)

        work = here()
        try:
            if _loop is None:
                return await work
            # Monarch runs actors on a loop of its own, and a service belongs to the loop of the run.
            self._calls[call_id] = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _loop))
            return await self._calls[call_id]
        except BaseException as error:
            return RemoteFailure.capture(f"{service}.{call.endpoint}, called by {where},", error)
        finally:
            self._calls.pop(call_id, None)

    @concurrent_endpoint
    async def cancel(self, call_id: str) -> None:
        """Cancel a call that was dispatched."""
        if call_id in self._calls:
            self._calls[call_id].cancel()

    @concurrent_endpoint
    async def end_session(self, service: str, session: str) -> None:
        """End a session of a service."""
        if _find is not None and _loop is not None:
            _loop.call_soon_threadsafe(_find(service)._end_session, session)


class RemoteService(Handle):
    """A service of another process. Its verbs are for `async def` endpoints."""

    def __init__(self, name: str, endpoints: frozenset[str], call_timeout: float, relay: Any) -> None:
        super().__init__(name, endpoints)
        self._call_timeout, self._relay = call_timeout, relay

    def __reduce__(self):
        return RemoteService, (self._name, self._endpoints, self._call_timeout, self._relay)

    def named(self, name: str) -> RemoteService:
        """Another service with the same endpoints."""
        return RemoteService(name, self._endpoints, self._call_timeout, self._relay)

    async def _dispatch(self, call: Call) -> Any:
        limit = (call.timeout or self._call_timeout) + GRACE
        where = os.environ.get(PROCESS_NAME, "another process")
        call_id = new_id(where)
        answer = self._relay.dispatch.call_one(call_id, self._name, call, where).as_asyncio()
        try:
            value = await asyncio.wait_for(answer, limit)
        except TimeoutError:
            self._relay.cancel.broadcast(call_id)
            raise CallTimeout(
                f"{where} waited {limit:g} s for the controller to call {self._name}.{call.endpoint}"
            ) from None
        except asyncio.CancelledError:
            self._relay.cancel.broadcast(call_id)
            raise
        if isinstance(value, RemoteFailure):
            raise value.to_exception()
        return value

    def _end_session(self, session: str) -> None:
        self._relay.end_session.broadcast(self._name, session)


def open_relay(find: Callable[[str], Service]) -> None:
    """Let other actors call the services that `find` knows by name, on the running event loop."""
    global _find, _loop
    _find, _loop = find, asyncio.get_running_loop()


def close_relay() -> None:
    """Calls from other actors raise ServiceStopped from now on."""
    global _find, _loop, _relay
    _find = _loop = _relay = None


def pickled(service: Service) -> tuple[Any, ...]:
    """`__reduce__` of a service: a handle for another process."""
    global _relay
    if _find is None:
        raise RuntimeError(f"{service._name} cannot be sent to another process: its run is over")
    if _relay is None:
        _relay = this_proc().spawn(f"relay_{os.getpid()}_{id(_loop)}", Relay)
    return RemoteService, (service._name, service._endpoints, service._options.call_timeout, _relay)
