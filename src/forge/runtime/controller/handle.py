"""A component as its callers see it: `await policy.generate.route(prompt)`, `await policy.update_weights.fanout(3)`.

The verbs: `route` sends to one replica (the least loaded, or the session's), `fanout` to every replica, `call` to
every rank of a component that has one replica, `call_one` to a component of one process. A replica of several
processes runs a routed call on every rank; rank 0's value is the answer.
"""

import asyncio
import contextvars
import inspect
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from ...config.plugin import hint_nearest
from ...observability.metrics import on_the_clock
from .errors import CallTimeout
from .types import Call, Kwargs, Pending, Value, name_caller, without_stop

# Entry points: functions of a handle or endpoint by other libraries' names, or classes of objects with its methods.
FOREIGN = "forge.verbs"
HOOKS = ("hint", "component")  # entry points of this group that are no verbs

_session: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("forge_sessions")
_session_ids = itertools.count()


class Session(str):
    """The id of a session; torchforge's programs read it as `session_id`."""

    @property
    def session_id(self) -> str:
        """Return the id as plain text."""
        return str(self)


class Handle(ABC):
    """A service as its callers see it: each endpoint is an attribute, and `session` opens a session."""

    def __init__(self, name: str, endpoints: frozenset[str]) -> None:
        self._name, self._endpoints = name, endpoints

    @abstractmethod
    async def _dispatch(self, call: Call) -> Value:
        """Carry out a call and return its value: directly in the controller, through the controller in other
        processes."""

    @abstractmethod
    def _end_session(self, session: str) -> None:
        """Forget which replica the calls of a session go to."""

    def __getattr__(self, name: str) -> Any:
        # Through __dict__: an attribute that is missing while a handle is unpickled must not lead back here.
        endpoints = self.__dict__.get("_endpoints", ())
        if name in endpoints:
            return Endpoint(self, name)
        if (verb := _foreign_verb(self, name)) is not None:
            return verb
        hint = foreign_hint(name) or hint_nearest(name, sorted(endpoints))
        raise AttributeError(f"{self.__dict__.get('_name', 'service')} has no endpoint {name!r}{hint}")

    @asynccontextmanager
    async def session(self, session_id: str | None = None) -> AsyncIterator[Session]:
        """Yield the id of a session: within the block, `route` sends every call to the same replica.

        That keeps a cache or a conversation in one place. If the replica is lost, the session moves to another one,
        without what the first had stored.

        Args:
            session_id: name of a session that several callers share; the session continues after the block. None opens
                a session that ends with the block.
        """
        ends_here = session_id is None
        session_id = session_id or f"{self._name}-{os.getpid()}-{next(_session_ids)}"
        token = _session.set({**_session.get({}), self._name: session_id})
        try:
            yield Session(session_id)
        finally:
            _session.reset(token)
            if ends_here:
                self._end_session(session_id)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint of a service. Call it with one of the verbs: `route`, `fanout`, `call`, `call_one`."""

    service: Handle
    name: str
    timeout: float | None = None
    session: str | None = None
    request_id: str | None = None

    def __call__(self, *args: object, **kwargs: object) -> None:
        name = f"{self.service._name}.{self.name}"
        raise TypeError(f"{name} is an endpoint of another process: write `await {name}.route(...)`")

    def __getattr__(self, name: str) -> Callable[..., Pending[Value]]:
        if (verb := _foreign_verb(self, name)) is not None:
            return verb
        hint = foreign_hint(name) or "; the verbs are route, fanout, call and call_one"
        raise AttributeError(f"an endpoint has no {name!r}{hint}")

    def options(
        self, *, timeout: float | None = None, session: str | None = None, request_id: str | None = None
    ) -> "Endpoint":
        """Return the endpoint with other settings: `policy.generate.options(timeout=30).route(prompt)`.

        Args:
            timeout: seconds until the call raises CallTimeout, the wait for a replica included; None is the component's
                `call_timeout`.
            session: id of a session, instead of a `session()` block.
            request_id: the id that `forge.runtime.controller.request_id()` returns in the endpoint; None makes one.
        """
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout must be positive (seconds), got {timeout}")
        return replace(self, timeout=timeout, session=session, request_id=request_id)

    def route(self, *args: object, **kwargs: object) -> Pending[Value]:
        """Send the call to one replica and return its value.

        If the replica is lost meanwhile, another one gets the call: an endpoint may see a call twice. The keyword
        `sess_id` is not passed to the endpoint: it is torchforge's spelling of `options(session=...)`.

        Raises:
            CallTimeout: no answer within the time limit.
            PoisonRequest: the call seems to have killed the replicas that served it.
            ReplicaDied: each replica that served the call died, and the retries are used up.
            Exception: what the endpoint raised.
        """
        if (sess_id := kwargs.pop("sess_id", None)) is not None:
            return replace(self, session=str(sess_id)).route(*args, **kwargs)
        return self.service._dispatch(self._make_call("route", args, kwargs))

    def fanout(self, *args: object, **kwargs: object) -> Pending[list[Value]]:
        """Send the call to every replica and return one value for each, in the order of their indices.

        It waits for replicas that are being replaced; of an endpoint with `catch_up` these get the call before they
        serve, and give no value.

        Raises:
            Exception: the first failure, once every replica has answered or failed.
        """
        return self.service._dispatch(self._make_call("fanout", args, kwargs))

    def call(self, *args: object, **kwargs: object) -> Pending[list[Value]]:
        """Send the call to a component with one replica and return the values of all of its ranks, in rank order."""
        return self.service._dispatch(self._make_call("call", args, kwargs))

    def call_one(self, *args: object, **kwargs: object) -> Pending[Value]:
        """Send the call to a component with one replica of one process, and return its value."""
        return self.service._dispatch(self._make_call("call_one", args, kwargs))

    def _make_call(self, verb: str, args: tuple, kwargs: Kwargs) -> Call:
        # The caller's name and session are those of the place where the call is written, not where it is awaited.
        session = self.session or _session.get({}).get(self.service._name)
        return Call(verb, self.name, args, kwargs, name_caller(), self.timeout, session, self.request_id)


class Local(Handle):
    """A component in the process of its caller, created by `ForgeActor.as_local`.

    Arguments and values are shared with the caller, not copied. `async def` endpoints run in the caller's event loop.
    Plain `def` endpoints run in the component's thread, one at a time, so that slow ones (tokenising, reading files) do
    not block the loop.
    """

    CALL_TIMEOUT = 1800.0  # seconds, unless a call sets another; the default of `Options.call_timeout`

    def __init__(self, name: str, component: object, endpoints: Mapping[str, bool]) -> None:
        super().__init__(name, frozenset(endpoints))
        self._component = component
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def _dispatch(self, call: Call) -> Value:
        # The component is in this process: its method is called directly, with a time limit as elsewhere.
        method = getattr(self._component, call.endpoint)
        limit = call.timeout or self.CALL_TIMEOUT
        try:
            with on_the_clock(f"{self._name}.{call.endpoint}"):
                async with asyncio.timeout(limit) as expiry:
                    value = await self._call_method(method, *call.args, **call.kwargs)
        except TimeoutError:
            if not expiry.expired():  # the endpoint itself raised it
                raise
            raise CallTimeout(
                f"{call.caller} waited {limit:g} s for {self._name}.{call.endpoint}, which runs in the same process: "
                "raise the call's timeout"
            ) from None

        return value if call.verb in ("route", "call_one") else [value]

    async def _call_method(self, method: Callable[..., Any], *args: object, **kwargs: object) -> Value:
        if inspect.iscoroutinefunction(method):
            return await method(*args, **kwargs)
        # The thread sees the caller's context, as an `async def` endpoint does.
        work = partial(contextvars.copy_context().run, without_stop, method, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _end_session(self, session: str) -> None:
        """Do nothing: there is only one instance for all sessions."""


def foreign_hint(name: str) -> str:
    """Return the end of an error message, starting with ":", that names forge's equivalent of another library's name.

    The entry point `hint` of the group FOREIGN provides it. Empty if there is none, or it does not know the name.
    """
    points = entry_points(group=FOREIGN, name="hint")
    return next(iter(points)).load()(name) if points else ""


def foreign_component(component: Any, arguments: Kwargs) -> tuple[Any, Kwargs]:
    """Convert the class and arguments of a component that is started with another library's arguments, and return both.

    The entry point `component` of the group FOREIGN converts them. Arguments of this library's form are returned as
    they are, with the component.
    """
    points = entry_points(group=FOREIGN, name="component")
    return next(iter(points)).load()(component, arguments) if points else (component, arguments)


# Return another library's verb of this name, bound to a handle or endpoint; None if no package provides it.
def _foreign_verb(owner: object, name: str) -> Callable[..., Pending[Value]] | None:
    # Asked last: none of these names is reserved, and a component may define its own endpoint `get_metrics`.
    points = () if name.startswith("_") or name in HOOKS else entry_points(group=FOREIGN, name=name)
    if not points:
        return None
    verb = next(iter(points)).load()
    return verb(owner) if isinstance(verb, type) else partial(verb, owner)
