"""A component as its callers see it: `await policy.generate.route(prompt)`, `await policy.update_weights.fanout(3)`.

The verbs: `route` sends to one replica (the least loaded, or the session's), `fanout` to every replica, `call` to
every rank of a component that has one replica, `call_one` to a component of one process. A replica of several
processes runs a routed call on every rank; rank 0's value is the answer.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...config.plugin import nearest
from ...observability.metrics import on_the_clock
from .errors import CallTimeout
from .request import caller

_session: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("forge_sessions")
_session_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a service: an endpoint with its arguments, and how to send it."""

    verb: str
    endpoint: str
    args: tuple
    kwargs: dict[str, Any]
    caller: str
    timeout: float | None = None
    session: str | None = None
    request_id: str | None = None


class Handle(ABC):
    """What can be done with a service from anywhere: its endpoints, and sessions."""

    def __init__(self, name: str, endpoints: frozenset[str]) -> None:
        self._name, self._endpoints = name, endpoints

    @abstractmethod
    async def _dispatch(self, call: Call) -> Any:
        """Carry out a call; in the controller by sending it, elsewhere by asking the controller to."""

    @abstractmethod
    def _end_session(self, session: str) -> None:
        """Forget which replica a session belongs to."""

    def __getattr__(self, name: str) -> Endpoint:
        # Through __dict__: an attribute that is missing while a handle is unpickled must not lead back here.
        known = self.__dict__.get("_endpoints", ())
        if name in known:
            return Endpoint(self, name)
        raise AttributeError(
            f"{self.__dict__.get('_name', 'service')} has no endpoint {name!r}{nearest(name, sorted(known))}"
        )

    @asynccontextmanager
    async def session(self, session_id: str | None = None) -> AsyncIterator[str]:
        """Within the block, `route` keeps going to one replica (where it keeps a cache or a conversation).

        If that replica is lost, the session moves to another; whatever it kept there is gone.

        Args:
            session_id: name of a session that several callers share; it outlives the block. None makes one that ends
                with it.
        """
        own = session_id is None
        session_id = session_id or f"{self._name}-{os.getpid()}-{next(_session_ids)}"
        token = _session.set({**_session.get({}), self._name: session_id})
        try:
            yield session_id
        finally:
            _session.reset(token)
            if own:
                self._end_session(session_id)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint of a service, to be sent with one of the verbs."""

    service: Handle
    name: str
    timeout: float | None = None
    session: str | None = None
    request_id: str | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        name = f"{self.service._name}.{self.name}"
        raise TypeError(f"{name} runs in a process of its own: write `await {name}.route(...)`")

    def options(
        self, *, timeout: float | None = None, session: str | None = None, request_id: str | None = None
    ) -> Endpoint:
        """The endpoint with settings of its own: `policy.generate.options(timeout=30).route(prompt)`.

        Args:
            timeout: seconds until the call is an error, waiting for a replica included; None is `call_timeout`.
            session: id of a session, instead of a `session()` block.
            request_id: what `forge.runtime.controller.request_id()` gives in the endpoint; None makes one.
        """
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout must be positive (seconds), got {timeout}")
        return replace(self, timeout=timeout, session=session, request_id=request_id)

    def route(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Send to one replica and return its answer.

        If the replica is lost meanwhile, another one gets the call: an endpoint may see a call twice.

        Raises:
            what the endpoint raised; CallTimeout, PoisonRequest, or ReplicaDied when there is no more to try.
        """
        return self._send("route", args, kwargs)

    def fanout(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, list[Any]]:
        """Send to every replica, also to those that are just being replaced; one answer each, in replica order.

        Raises:
            the first failure, once every replica has answered or failed.
        """
        return self._send("fanout", args, kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, list[Any]]:
        """Send to every rank of a component with one replica; one value each, in rank order."""
        return self._send("call", args, kwargs)

    def call_one(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Send to a component of one process."""
        return self._send("call_one", args, kwargs)

    def _send(self, verb: str, args: tuple, kwargs: dict[str, Any]) -> Coroutine[Any, Any, Any]:
        # Not a coroutine itself: the call, its caller and its session are those of the moment when it is written.
        session = self.session or _session.get({}).get(self.service._name)
        call = Call(verb, self.name, args, kwargs, caller(), self.timeout, session, self.request_id)

        async def timed() -> Any:
            with on_the_clock(f"{self.service._name}.{self.name}"):
                return await self.service._dispatch(call)

        return timed()


class Local(Handle):
    """A component in the process of its caller, made by `ForgeActor.as_local`. Arguments and answers are shared with
    the caller, not copied.

    `async def` endpoints run in the caller's event loop. Plain `def` endpoints run in a thread of the component's own,
    one at a time, so that slow ones (tokenising, reading files) do not block the loop.
    """

    CALL_TIMEOUT = 1800.0  # seconds, where a call sets none

    def __init__(self, name: str, component: Any, endpoints: Mapping[str, bool]) -> None:
        super().__init__(name, frozenset(endpoints))
        self._component = component
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def _dispatch(self, call: Call) -> Any:
        method, limit = getattr(self._component, call.endpoint), call.timeout or self.CALL_TIMEOUT
        try:
            async with asyncio.timeout(limit) as expiry:
                if inspect.iscoroutinefunction(method):
                    answer = await method(*call.args, **call.kwargs)
                else:
                    context = contextvars.copy_context()
                    work = partial(context.run, _without_stop, method, *call.args, **call.kwargs)
                    answer = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except TimeoutError:
            if not expiry.expired():  # the component's own
                raise
            raise CallTimeout(
                f"{call.caller} waited {limit:g} s for {self._name}.{call.endpoint}, in this process"
            ) from None
        return answer if call.verb in ("route", "call_one") else [answer]

    def _end_session(self, session: str) -> None:
        """Nothing to forget: there is one instance."""


def _without_stop(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The method's answer. A future cannot carry StopIteration: the caller would wait for ever."""
    try:
        return method(*args, **kwargs)
    except StopIteration as error:
        raise RuntimeError("it raised StopIteration: the iterator is exhausted") from error
