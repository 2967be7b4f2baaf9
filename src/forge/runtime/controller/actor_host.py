"""The process side of replicas: one Monarch actor that hosts the components of a process and answers calls for them.

User code never runs on the event loop unless it is `async def`, so a busy component still answers `ping`:
an `async def` endpoint interleaves with others as asyncio does; a plain `def` endpoint runs in the component's own
thread, one at a time, in the order in which calls arrived.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ...observability.console import configure_logging
from ...observability.metrics import PROCESS_NAME, drain, process_name
from ...observability.profiler import profile_next
from ..names import HOST
from ..process import machine_id
from ._monarch import Actor, concurrent_endpoint, current_rank
from .errors import RemoteFailure
from .types import ActorContext, Kwargs, _request

# A rank and its value. The values differ by endpoint: callers know which to expect.
Answer = tuple[int, Any]
Function = Callable[..., Any]

# The newest `ActorHost` of each name, in a process that forge did not start.
_named: dict[str, ActorHost] = {}
# The token of the request that the running task serves, and that its thread inherits.
_token: contextvars.ContextVar[int | None] = contextvars.ContextVar("forge_token", default=None)


class ActorHost(Actor):
    """Hosts components, each under its replica's number. Every endpoint returns `(rank, value or RemoteFailure)` and
    never raises: an exception would end this actor, and with it every component of the process.

    Args:
        name: of a process that forge did not start, for its log lines and traces. The first one holds.
    """

    def __init__(self, name: str | None = None) -> None:
        # Of the same name in this process: Monarch gave it up, though it lives.
        self._predecessor: ActorHost | None = None
        if name is not None:
            os.environ.setdefault(PROCESS_NAME, name)
            configure_logging()
            self._predecessor = _named.get(name)
            _named[name] = self
        self._hosted: dict[int, Hosted] = {}
        self._serving: dict[int, asyncio.Task] = {}
        # Components of a process are set up one after the other: large libraries fail when two threads import them at
        # once.
        self._setting_up = asyncio.Lock()

    @concurrent_endpoint
    async def ping(self) -> Answer:
        """Return the process id of every rank, and the address of its host in the pool, or else its machine."""
        return current_rank().rank, (os.getpid(), os.environ.get(HOST) or machine_id())

    @concurrent_endpoint
    async def start(self, number: int, context: ActorContext, definition: bytes) -> Answer:
        """Build a component from its pickled (class, args, kwargs) and run its `setup`; in a replaced process, its
        `on_respawn` too."""
        context = replace(context, rank=current_rank().rank if context.world_size > 1 else 0)
        hosted = Hosted(context)
        steps: list[str | Function] = [lambda: hosted.build(definition), "setup"]

        async with self._setting_up:
            if self._predecessor is not None:
                await self._predecessor.clear()
                self._predecessor = None
            for step in steps:
                answer = await hosted.run(step)
                if isinstance(answer[1], RemoteFailure):
                    return answer

        if context.incarnation:
            answer = await hosted.run("on_respawn")
        if not isinstance(answer[1], RemoteFailure):
            self._hosted[number] = hosted
        return answer

    @concurrent_endpoint
    async def invoke(
        self, number: int, token: int, request_id: str, method: str, args: tuple, kwargs: Kwargs
    ) -> Answer:
        """Call an endpoint of a hosted component."""
        hosted = self._hosted.get(number)
        # The replica was closed while the call was on its way.
        if hosted is None:
            missing = LookupError(f"replica {number} is not in this process")
            return current_rank().rank, RemoteFailure.capture(f"{method} (pid {os.getpid()})", missing)

        # `cancel` reaches a call by the task that serves it; the endpoint reads both ids from its context.
        task = asyncio.current_task()
        assert task is not None
        self._serving[token] = task
        _token.set(token)
        _request.set(request_id)
        try:
            return await hosted.run(method, *args, **kwargs)
        finally:
            del self._serving[token]

    @concurrent_endpoint
    async def cancel(self, token: int) -> Answer:
        """Stop work on a request whose caller no longer waits. Returns False for a plain endpoint that has started: a
        thread cannot be stopped."""
        if any(hosted.in_thread_now == token for hosted in self._hosted.values()):
            return current_rank().rank, False
        if token in self._serving:
            self._serving[token].cancel()
        return current_rank().rank, True

    @concurrent_endpoint
    async def drain_metrics(self, profiles: Mapping[str, str]) -> Answer:
        """Return the metrics of this process since the last call. `profiles` is the folder of the next step's profile
        by component; the first component of this process that it names is profiled."""
        components = {hosted.context.component for hosted in self._hosted.values()}
        profile_next(next((profiles[name] for name in components & profiles.keys()), None), process_name())
        return current_rank().rank, drain()

    @concurrent_endpoint
    async def close(self, number: int) -> Answer:
        """Run a component's `teardown`. The owner of the process stops it, unless it hosts other components."""
        return await self._close_component(number)

    async def _close_component(self, number: int) -> Answer:
        hosted = self._hosted.pop(number)
        reply = await hosted.run("teardown")
        hosted.thread.shutdown(wait=False)
        return reply

    async def clear(self) -> None:
        """Close all components, once what runs in their threads has ended: others take their place."""
        for task in self._serving.values():
            task.get_loop().call_soon_threadsafe(task.cancel)
        for number, hosted in list(self._hosted.items()):
            await hosted.in_thread(lambda: None)  # behind what runs there
            await self._close_component(number)


# A process of a user's mesh may import this package in one thread, for an actor of the user's, while Monarch unpickles
# this class in another. By the name of the module Python would lock the module before the package, which is a deadlock
# to the first thread (one run of the tests in ten).
ActorHost.__module__ = __package__


class Hosted:
    """One component of a process: its instance, and the thread of its plain endpoints."""

    instance: Any  # of the user's class, which calls reach by name

    def __init__(self, context: ActorContext) -> None:
        self.context = context
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=context.component)
        self.in_thread_now: int | None = None  # the request, by token, that its thread works on

    def build(self, definition: bytes) -> None:
        """Construct the component from its pickled class and arguments."""
        cls, args, kwargs = pickle.loads(definition)
        self.instance = cls.__new__(cls)
        self.instance.context = self.context
        self.instance.__init__(*args, **kwargs)

    async def run(self, method: str | Function, *args: object, **kwargs: object) -> Answer:
        """Run a method, async ones in the event loop and plain ones in the component's thread; return the rank and the
        value, or an exception as `RemoteFailure`."""
        try:
            function = getattr(self.instance, method) if isinstance(method, str) else method
            if inspect.iscoroutinefunction(function):
                return self.context.rank, await function(*args, **kwargs)
            return self.context.rank, await self.in_thread(lambda: function(*args, **kwargs))
        # The caller decides what an error means, even one that asks this process to exit.
        except BaseException as error:
            name = method if isinstance(method, str) else "setup"
            return self.context.rank, RemoteFailure.capture(f"{self.context}.{name} (pid {os.getpid()})", error)

    async def in_thread(self, function: Function) -> object:
        """Run a function in the component's thread, with the caller's context."""
        context = contextvars.copy_context()

        def run_method() -> object:
            self.in_thread_now = _token.get()
            try:
                return function()
            except StopIteration as error:
                # A future cannot carry it: the caller would wait forever.
                raise RuntimeError("it raised StopIteration: the iterator is exhausted") from error
            finally:
                self.in_thread_now = None

        return await asyncio.get_running_loop().run_in_executor(self.thread, context.run, run_method)
