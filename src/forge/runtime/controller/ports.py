"""Endpoints that answer through a port, as Monarch's `explicit_response_port` has them.

class Queue(ForgeActor):
    @monarch.actor.endpoint(explicit_response_port=True)
    def get(self, port):                     # the answer may come later, from another endpoint
        self.waiting.append(port)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from ._monarch import ActorError

log = logging.getLogger(__name__)
_working: set[asyncio.Future[object]] = set()


class ReplyPort:
    """The port of one call. Its first answer, from any thread, is the call's; further ones are dropped."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.reply: asyncio.Future[object] = self._loop.create_future()

    def send(self, value: object) -> None:
        """Answer with a value."""
        self._loop.call_soon_threadsafe(self._set, value, None)

    def exception(self, error: Exception) -> None:
        """Answer with an error, which the caller sees as raised by the endpoint."""
        cause = error.exception if isinstance(error, ActorError) else error
        self._loop.call_soon_threadsafe(self._set, None, cause)

    def _set(self, value: object, error: Exception | None) -> None:
        if self.reply.done():
            return
        if error is None:
            self.reply.set_result(value)
        else:
            self.reply.set_exception(error)

    def finished(self, work: asyncio.Future[object]) -> None:
        """Answer with the error of an endpoint that raised one before it answered."""
        error = None if work.cancelled() else work.exception()
        if error is None:
            return
        # No caller waits any more: only the log is left to say it.
        if self.reply.done():
            log.error("an endpoint raised after it had answered through its port", exc_info=error)
        elif isinstance(error, Exception):
            self.reply.set_exception(error)
        else:
            self.reply.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


def marked_as_port(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method as one that answers through its first argument."""
    method.__forge_port__ = True  # type: ignore[attr-defined]
    return method


def has_port(method: Callable[..., Any]) -> bool:
    """Whether a method answers through a port."""
    return getattr(method, "__forge_port__", False)


async def through_port(call: Callable[[ReplyPort], Awaitable[object]]) -> object:
    """Call a method with a port and return what it sends, while the method may still work. Cancelling this cancels it.

    Raises:
        what the method raised before it answered, or sent by `exception`.
    """
    port = ReplyPort()
    work = asyncio.ensure_future(call(port))
    _working.add(work)
    work.add_done_callback(_working.discard)
    work.add_done_callback(port.finished)
    try:
        return await port.reply
    except asyncio.CancelledError:
        work.cancel()
        raise
