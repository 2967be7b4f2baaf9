"""Handles of services for other processes: each call is sent to the controller, which routes it.

One process decides where calls go, so that balance, sessions and quarantine are exact for all callers.
"""

import asyncio
import os
from collections.abc import Callable
from typing import Any

from ...observability.metrics import PROCESS_NAME, on_the_clock
from ._monarch import Actor, concurrent_endpoint, this_proc
from .errors import CallTimeout, RemoteFailure, ServiceStopped
from .handle import Handle
from .types import Call, Value, new_id

# Seconds that a call may take beyond its own limit before the controller counts as unreachable.
GRACE = 15.0

# Set by `open_relay` in the controller's process: finds a service of the run by name; the run's event loop; the actor.
_find: Callable[[str], Handle] | None = None
_loop: asyncio.AbstractEventLoop | None = None
_relay: Any = None


class Relay(Actor):
    """Actor in the controller's process that calls services on behalf of other processes."""

    def __init__(self) -> None:
        self._calls: dict[str, asyncio.Future[Value]] = {}

    @concurrent_endpoint(explicit_response_port=True)
    async def dispatch(self, port: Any, call_id: str, service: str, call: Call, caller: str) -> None:
        """Call a service of the controller for the process `caller`, and send its value or RemoteFailure to `port`.

        Args:
            call_id: id by which `cancel` cancels the call.
        """
        # By default an undeliverable answer, whose caller has ended, comes back and fails this actor.
        # Monarch starts no actor alongside a failed one, so that no additional run could start in this process.
        port.return_undeliverable = False
        answer = await self._answer_call(call_id, service, call, caller)
        try:
            port.send(answer)
        except Exception as error:  # a component of this process may return what cannot be pickled
            port.send(RemoteFailure.capture(f"{service}.{call.endpoint}, called by {caller},", error))

    async def _answer_call(self, call_id: str, service: str, call: Call, caller: str) -> Value | RemoteFailure:
        async def call_service() -> Value:
            if _find is None:
                raise ServiceStopped(f"{service} cannot be called, because its run has ended")
            return await _find(service)._dispatch(call)

        # The service's value, or its error as a value: the caller's process raises it.
        calling = call_service()
        try:
            if _loop is None:
                return await calling

            # Monarch runs actors on a separate loop, and a service belongs to the loop of the run.
            self._calls[call_id] = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(calling, _loop))
            return await self._calls[call_id]
        except BaseException as error:
            return RemoteFailure.capture(f"{service}.{call.endpoint}, called by {caller},", error)
        finally:
            self._calls.pop(call_id, None)

    @concurrent_endpoint
    async def cancel(self, call_id: str) -> None:
        """Cancel the call that was dispatched under this id, if it is not answered yet."""
        if call_id in self._calls:
            self._calls[call_id].cancel()

    @concurrent_endpoint
    async def end_session(self, service: str, session: str) -> None:
        """Forget which replica of `service` the calls of `session` go to."""
        if _find is not None and _loop is not None:
            _loop.call_soon_threadsafe(_find(service)._end_session, session)


class RemoteService(Handle):
    """The handle of a service outside of the controller's process; its verbs are awaited in `async def` endpoints.

    Args:
        call_timeout: seconds until a call without its own limit raises CallTimeout.
        relay: the controller's `Relay` actor, which makes the calls.
    """

    def __init__(self, name: str, endpoints: frozenset[str], call_timeout: float, relay: Any) -> None:
        super().__init__(name, endpoints)
        self._call_timeout, self._relay = call_timeout, relay

    def __reduce__(self):
        return RemoteService, (self._name, self._endpoints, self._call_timeout, self._relay)

    def named(self, name: str) -> "RemoteService":
        """Return the handle of the service `name` of the same run, which has the same endpoints and time limit."""
        return RemoteService(name, self._endpoints, self._call_timeout, self._relay)

    async def _dispatch(self, call: Call) -> Value:
        # The controller calls the service, by way of the relay, and sends back its value or its error.
        limit = (call.timeout or self._call_timeout) + GRACE
        caller = os.environ.get(PROCESS_NAME, "another process")
        call_id = new_id(caller)
        reply = self._relay.dispatch.call_one(call_id, self._name, call, caller).as_asyncio()

        try:
            with on_the_clock(f"{self._name}.{call.endpoint}"):
                value = await asyncio.wait_for(reply, limit)
        except TimeoutError:
            # Otherwise the replica would go on working for a caller that no longer waits.
            self._relay.cancel.broadcast(call_id)
            raise CallTimeout(
                f"{caller} waited {limit:g} s for the controller to call {self._name}.{call.endpoint}"
            ) from None
        except asyncio.CancelledError:
            self._relay.cancel.broadcast(call_id)
            raise

        if isinstance(value, RemoteFailure):
            raise value.to_exception()
        return value

    def _end_session(self, session: str) -> None:
        self._relay.end_session.broadcast(self._name, session)


def open_relay(find: Callable[[str], Handle]) -> None:
    """Let other processes call services of this process from now on; the calls are made in the running event loop.

    Args:
        find: returns the service of a name.
    """
    global _find, _loop
    _find = find
    _loop = asyncio.get_running_loop()


def close_relay() -> None:
    """Stop the relay that `open_relay` started: calls from other processes raise ServiceStopped from now on."""
    global _find, _loop, _relay
    _find = _loop = _relay = None


def relay_for(service: str) -> Any:
    """Return the relay actor of this run, which is started on first use and is stored in pickled handles of `service`.

    Raises:
        RuntimeError: the run is over.
    """
    global _relay
    if _find is None:
        raise RuntimeError(f"{service} cannot be sent to another process, because its run has ended")
    if _relay is None:
        _relay = this_proc().spawn(f"relay_{os.getpid()}_{id(_loop)}", Relay)
    return _relay
