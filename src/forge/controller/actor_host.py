"""The process side of a replica: a Monarch actor that hosts one component and answers calls for it.

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
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

from ..cluster import HOST
from ..observability.metrics import drain
from ._monarch import Actor, concurrent_endpoint, current_rank
from .context import ActorContext, _request
from .errors import RemoteFailure

Answer = tuple[int, Any]

# Components that share a process are set up one after the other: large libraries do not survive being imported for the
# first time by two threads at once.
_setting_up = threading.Lock()

_token: contextvars.ContextVar[int | None] = contextvars.ContextVar("forge_token", default=None)


class ActorHost(Actor):
    """Hosts `cls(*args, **kwargs)`; every endpoint answers `(rank, value or RemoteFailure)`, and never raises."""

    here: ClassVar[dict[ActorContext, ActorHost]] = {}  # those of this process, by what their replicas say

    def __init__(self, context: ActorContext) -> None:
        self.here[context] = self
        self._known_as = context
        self._context = replace(context, rank=current_rank().rank)
        self._instance: Any = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=context.component)
        self._serving: dict[int, asyncio.Task] = {}
        self._in_thread_now: int | None = None

    @concurrent_endpoint
    async def ping(self) -> Answer:
        return self._context.rank, (os.getpid(), os.environ.get(HOST, ""))

    @concurrent_endpoint
    async def start(self, definition: bytes, rendezvous: str | None) -> Answer:
        """Build the component from its pickled (class, args, kwargs) and run its `setup`; in a replaced process, its
        `on_respawn` too."""

        def build() -> Any:
            cls, args, kwargs = pickle.loads(definition)
            instance = cls.__new__(cls)
            instance.context = self._context
            instance.__init__(*args, **kwargs)
            return instance

        async def start() -> None:
            self._context = replace(self._context, rendezvous=rendezvous)
            await asyncio.to_thread(_setting_up.acquire)
            try:
                self._instance = await self._in_thread(build)
                await self._run(self._instance.setup)
            finally:
                _setting_up.release()
            if self._context.incarnation:
                await self._run(self._instance.on_respawn)

        return await self._guarded("setup", start)

    @concurrent_endpoint
    async def invoke(self, token: int, request_id: str, method: str, args: tuple, kwargs: dict[str, Any]) -> Answer:
        return await self._invoke(token, request_id, method, args, kwargs)

    async def _invoke(self, token: int, request_id: str, method: str, args: tuple, kwargs: dict[str, Any]) -> Answer:
        task = asyncio.current_task()
        assert task is not None
        self._serving[token] = task
        _token.set(token)
        _request.set(request_id)
        try:
            return await self._guarded(method, lambda: self._run(getattr(self._instance, method), *args, **kwargs))
        finally:
            del self._serving[token]

    @concurrent_endpoint
    async def invoke_each(
        self, calls: list[tuple[ActorContext, int, str]], method: str, payload: bytes
    ) -> tuple[int, list[Answer]]:
        """`invoke` on several components of this process, with what each of them is known as, a token and a request
        id. `payload` is the pickled (args, kwargs)."""

        async def one(context: ActorContext, token: int, request_id: str) -> Answer:
            try:
                args, kwargs = pickle.loads(payload)
                host = self.here[context]
            except BaseException as error:
                return 0, RemoteFailure.capture(f"{context}.{method} (pid {os.getpid()})", error)
            return await host._invoke(token, request_id, method, args, kwargs)

        return self._context.rank, list(await asyncio.gather(*(one(*call) for call in calls)))

    @concurrent_endpoint
    async def cancel(self, token: int) -> Answer:
        """Stop work on a request whose caller has stopped waiting. False if it cannot be stopped: a plain endpoint that
        has begun."""
        if token == self._in_thread_now:
            return self._context.rank, False
        if token in self._serving:
            self._serving[token].cancel()
        return self._context.rank, True

    @concurrent_endpoint
    async def drain_metrics(self) -> Answer:
        return self._context.rank, drain()

    @concurrent_endpoint
    async def close(self) -> Answer:
        """Run the component's `teardown`; the process is stopped afterwards by its owner."""

        async def close() -> None:
            if self._instance is not None:
                await self._run(self._instance.teardown)
            self._thread.shutdown(wait=False)
            self.here.pop(self._known_as, None)
            self._instance = None  # the process may live on with other components in it

        return await self._guarded("teardown", close)

    async def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        return await self._in_thread(lambda: function(*args, **kwargs))

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        context = contextvars.copy_context()

        def work() -> Any:
            self._in_thread_now = _token.get()
            try:
                return function()
            except StopIteration as error:
                # A future cannot carry it: the caller would wait for ever.
                raise RuntimeError("it raised StopIteration: the iterator is exhausted") from error
            finally:
                self._in_thread_now = None

        return await asyncio.get_running_loop().run_in_executor(self._thread, context.run, work)

    async def _guarded(self, call: str, make: Callable[[], Any]) -> Answer:
        try:
            return self._context.rank, await make()
        # The caller decides what an error means; raising here would end this actor, and with it every other call.
        except BaseException as error:
            return self._context.rank, RemoteFailure.capture(f"{self._context}.{call} (pid {os.getpid()})", error)
