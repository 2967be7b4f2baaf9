"""The process side of replicas: one Monarch actor that hosts the components of a process and answers calls for them.

User code never runs on the event loop unless it is `async def`, so a busy component still answers `ping`:
an `async def` endpoint interleaves with others as asyncio does; a plain `def` endpoint runs in the component's own
thread, one at a time, in the order in which calls arrived.
"""

import asyncio
import contextvars
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ...config.plugin import resolve
from ...observability.console import configure_logging
from ...observability.metrics import PROCESS_NAME, drain, process_name
from ..names import HOST
from ..process import machine_id
from ._monarch import Actor, concurrent_endpoint, current_rank
from .errors import RemoteFailure
from .types import ActorContext, Kwargs, _request, without_stop

# A rank and its value. The values differ by endpoint: callers know which to expect.
Answer = tuple[int, Any]
Function = Callable[..., Any]
PROFILER = "forge_inspect.profiler"

# The token of the request that the running task serves. The component's thread inherits it.
_token: contextvars.ContextVar[int | None] = contextvars.ContextVar("forge_token", default=None)


class ActorHost(Actor):
    """Monarch actor that hosts components, each under its replica's number. Every endpoint returns `(rank, value or
    RemoteFailure)` and never raises: an exception would end this actor, and with it every component of the process.

    Args:
        name: for the log lines and traces of a process that forge did not start; its first name stays. None in forge's
            own processes, whose environment has a name.
    """

    def __init__(self, name: str | None = None) -> None:
        if name is not None:
            os.environ.setdefault(PROCESS_NAME, name)
            configure_logging()
        self._hosted: dict[int, Hosted] = {}
        self._serving: dict[int, asyncio.Task] = {}
        # Components of a process are set up one after the other: large libraries fail when two threads import them at
        # once.
        self._setting_up = asyncio.Lock()

    @concurrent_endpoint
    async def ping(self) -> Answer:
        """Return (rank, (process id, host)) of this rank.

        `host` is the address by which the run knows the process's host, or `machine_id()` on a host without address.
        """
        return current_rank().rank, (os.getpid(), os.environ.get(HOST) or machine_id())

    @concurrent_endpoint
    async def start(self, number: int, context: ActorContext, definition: bytes) -> Answer:
        """Build a component and run its `setup`, then its `on_respawn` if its process replaces another one.

        Args:
            number: the replica's number, by which later calls name the component.
            definition: the pickled class, positional and keyword arguments of the component.
        """
        context = replace(context, rank=current_rank().rank if context.world_size > 1 else 0)
        hosted = Hosted(context)
        async with self._setting_up:
            answer = await hosted.run(hosted.build, definition)
            if not isinstance(answer[1], RemoteFailure):
                answer = await hosted.run("setup")

        # Not under the lock, which is for the imports of `setup`: restoring a state may take long.
        if context.incarnation and not isinstance(answer[1], RemoteFailure):
            answer = await hosted.run("on_respawn")

        if not isinstance(answer[1], RemoteFailure):
            self._hosted[number] = hosted
        return answer

    @concurrent_endpoint
    async def invoke(
        self, number: int, token: int, request_id: str, method: str, args: tuple, kwargs: Kwargs
    ) -> Answer:
        """Call the endpoint `method` of the component with this number; return (rank, value).

        Args:
            token: id of this attempt, by which `cancel` stops it.
            request_id: id of the request, which all of its attempts share.
        """
        hosted = self._hosted.get(number)
        if hosted is None:  # the replica was closed while the call was on its way
            missing = LookupError(
                f"replica {number} is no longer in this process: it was closed before the call arrived"
            )
            return current_rank().rank, RemoteFailure.capture(f"{method} (pid {os.getpid()})", missing)

        # `cancel` stops a call by its task. The endpoint and its thread read both ids from their context.
        self._serving[token] = asyncio.current_task()  # type: ignore[assignment]
        _token.set(token)
        _request.set(request_id)
        try:
            return await hosted.run(method, *args, **kwargs)
        finally:
            del self._serving[token]

    @concurrent_endpoint
    async def cancel(self, token: int) -> Answer:
        """Stop work on the attempt with this token, whose caller no longer waits; return (rank, is stopped).

        `is stopped` is False only for a plain (`def`) endpoint that has started: its thread cannot be stopped.
        """
        if any(hosted.in_thread_now == token for hosted in self._hosted.values()):
            return current_rank().rank, False
        if token in self._serving:
            self._serving[token].cancel()
        return current_rank().rank, True

    @concurrent_endpoint
    async def drain_metrics(self, profiles: Mapping[str, str]) -> Answer:
        """Return (rank, the metrics that this process recorded since the last call).

        Args:
            profiles: the folder for a profile of the next step, by component. A process that hosts one of these
                components profiles its next step; all others stop profiling.
        """
        components = {hosted.context.component for hosted in self._hosted.values()}
        if profiles or PROFILER in sys.modules:
            path = next((profiles[name] for name in components & profiles.keys()), None)
            resolve(f"{PROFILER}:profile_next", "metrics.profile")(path, process_name())
        return current_rank().rank, drain()

    @concurrent_endpoint
    async def close(self, number: int) -> Answer:
        """Run the `teardown` of the component with this number; the process continues until its owner stops it."""
        hosted = self._hosted.pop(number)
        reply = await hosted.run("teardown")
        hosted.thread.shutdown(wait=False)
        return reply


# Monarch unpickles this class by the module's name that it states. In a process of a user's mesh one thread may do that
# while another imports this package for an actor of the user's. Importing this module by its own name would lock it
# before the package, and the other thread locks them in the reverse order: a deadlock (in one run of the tests in ten).
ActorHost.__module__ = __package__


class Hosted:
    """One component of a process: its instance, and the thread of its plain (`def`) endpoints."""

    instance: Any  # of the component's class; calls look up its methods by name

    def __init__(self, context: ActorContext) -> None:
        self.context = context
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=context.component)
        self.in_thread_now: int | None = None  # the request, by token, that its thread works on

    def build(self, definition: bytes) -> None:
        """Construct the component from `definition`, its pickled class, positional and keyword arguments."""
        cls, args, kwargs = pickle.loads(definition)
        self.instance = cls.__new__(cls)
        self.instance.context = self.context
        self.instance.__init__(*args, **kwargs)

    async def run(self, method: str | Function, *args: object, **kwargs: object) -> Answer:
        """Run a method, given by name or as a function; return (rank, value), or (rank, RemoteFailure) if it raised.

        An `async def` method runs in the event loop, a plain one in the component's thread.
        """
        try:
            function = getattr(self.instance, method) if isinstance(method, str) else method
            if inspect.iscoroutinefunction(function):
                return self.context.rank, await function(*args, **kwargs)
            return self.context.rank, await self.in_thread(lambda: function(*args, **kwargs))
        # The caller decides what an error means, even a SystemExit: here it would end all components of the process.
        except BaseException as error:
            name = method if isinstance(method, str) else "setup"
            return self.context.rank, RemoteFailure.capture(f"{self.context}.{name} (pid {os.getpid()})", error)

    async def in_thread(self, function: Function) -> object:
        """Run a function in the component's thread, with the context variables of the caller."""
        context = contextvars.copy_context()

        def run_method() -> object:
            self.in_thread_now = _token.get()
            try:
                return without_stop(function)
            finally:
                self.in_thread_now = None

        return await asyncio.get_running_loop().run_in_executor(self.thread, context.run, run_method)
