"""Which replica serves which request, and when: capacity, sessions, and isolation of requests that may kill."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from .request import Request
from .routers import Router

if TYPE_CHECKING:
    from .replica import Replica

# Requests that were being served when their replica died are retried one by one: if one of them kills again, it is
# known which. Once it has run this many seconds unharmed the next one may start beside it. More than SMALL_CROWD
# suspects are retried in groups, at the price of one more death if the killer is among them.
ISOLATION = 1.0
SMALL_CROWD = 16
# How long such a request waits for a component whose thread is free, and how often that is checked.
LINE_PATIENCE = 10.0
LOOK_EVERY = 0.1
# Sessions that were opened without a block to close them are forgotten beyond this many, the oldest first.
MOST_SESSIONS = 65_536


class LoadBalancer:
    """Hands requests to the replicas that are up, first come first served; a request that waits for a certain replica
    lets others pass.

    Args:
        router: chooses among the replicas with room.
        max_in_flight: most requests at one replica.
    """

    def __init__(self, router: Router, max_in_flight: int) -> None:
        self.router, self.max_in_flight = router, max_in_flight
        self.up: list[Replica] = []
        self._sessions: OrderedDict[str, Replica] = OrderedDict()
        self._queue: deque[tuple[Request, asyncio.Future[Replica]]] = deque()
        self._closed: Callable[[], BaseException] | None = None
        self._drained: dict[int, asyncio.Event] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def queued(self) -> list[Request]:
        """Requests that wait for a replica."""
        return [request for request, _ in self._queue]

    def join(self, replica: Replica) -> None:
        """A replica serves from now on."""
        self.up.append(replica)
        self._settle()

    def leave(self, replica: Replica) -> None:
        """A replica serves no further requests. Its sessions move on with their next call."""
        if replica in self.up:
            self.up.remove(replica)

    async def drain(self, replica: Replica, timeout: float) -> None:
        """Send a replica nothing more and wait until it has finished its requests, at most `timeout` seconds."""
        self.leave(replica)
        drained = self._drained[id(replica)] = asyncio.Event()
        try:
            async with asyncio.timeout(timeout):
                while replica.requests:
                    drained.clear()
                    await drained.wait()
        except TimeoutError:
            return
        finally:
            del self._drained[id(replica)]

    def close(self, error: Callable[[], BaseException]) -> None:
        """No replica will ever come up again: present and later waiters get what `error` makes."""
        self._closed = error
        for _, waiter in self._queue:
            if not waiter.done():
                waiter.set_exception(error())
        self._queue.clear()

    def check_open(self) -> None:
        """Raises what `close` was given, if it was called."""
        if self._closed is not None:
            raise self._closed()

    def end_session(self, session: str) -> None:
        """Forget which replica a session goes to."""
        self._sessions.pop(session, None)

    async def acquire(self, request: Request) -> Replica:
        """Wait for a replica and enter the request there; the caller must `release` it.

        Raises:
            TimeoutError: the request's time limit passed.
            what `close` was given.
        """
        self.check_open()
        replica = self._choose(request)
        if replica is not None:
            replica.enter(request)
            return replica
        waiter: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        self._queue.append((request, waiter))
        try:
            async with asyncio.timeout(request.left):
                return await waiter
        except BaseException:
            if not waiter.done() or waiter.cancelled():
                if (request, waiter) in self._queue:  # unless it was closed meanwhile
                    self._queue.remove((request, waiter))
            elif waiter.exception() is None:  # given a replica at the moment when it stopped waiting
                self.release(waiter.result(), request)
            raise

    def release(self, replica: Replica, request: Request) -> None:
        """The request has its answer, or will get none here."""
        replica.leave(request)
        if not replica.requests and id(replica) in self._drained:
            self._drained[id(replica)].set()
        self._settle()

    def _settle(self) -> None:
        """Give waiting requests to the replicas that have room."""
        held: deque[tuple[Request, asyncio.Future[Replica]]] = deque()
        while self._queue and any(map(self._has_room, self.up)):
            request, waiter = self._queue.popleft()
            if waiter.done():
                held.append((request, waiter))  # stopped waiting, and is about to take itself out
                continue
            try:
                replica = self._choose(request)
            except Exception as error:  # of the user's router: it belongs to the caller
                waiter.set_exception(error)
                continue
            if replica is None:
                held.append((request, waiter))
            else:
                replica.enter(request)
                waiter.set_result(replica)
        self._queue.extendleft(reversed(held))

    def _choose(self, request: Request) -> Replica | None:
        """The replica for this request, or None if it must wait."""
        if request.session is not None:
            held = self._sessions.get(request.session)
            if held is not None and held.alive and held in self.up:
                self._sessions.move_to_end(request.session)
                return held if self._has_room(held) else None
        free = [replica for replica in self.up if self._has_room(replica)]
        if request.deaths:
            together = 1 if request.crowd <= SMALL_CROWD else request.crowd // 8
            now = time.monotonic()
            alone = [replica for replica in free if replica.isolated(now, ISOLATION, LINE_PATIENCE) < together]
            # Behind another call in a component's thread a death could not be attributed to one of the two.
            at_once = [replica for replica in alone if not replica.has_line_for(request)]
            free = at_once or (alone if now - request.lost > LINE_PATIENCE else [])
            if not free and self._timer is None:
                # Isolation ends with time, and maybe in another service of the same process: no event says so.
                self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY, self._look)
        free = [replica for replica in free if replica.index not in request.avoid] or free
        if not free:
            return None
        chosen = self.router(free, request)
        if not any(chosen is replica for replica in free):
            raise TypeError(f"the router returned {chosen!r}, which is none of the candidates that it was given")
        if request.session is not None:
            self._sessions[request.session] = chosen
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return chosen

    def _look(self) -> None:
        self._timer = None
        self._settle()

    def _has_room(self, replica: Replica) -> bool:
        # A replica that has just died stays in the list for a moment, until its supervisor takes it out.
        return replica.alive and replica.in_flight < self.max_in_flight
