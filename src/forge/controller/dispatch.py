"""Which replica serves which request, and when: room, sessions, and care with requests that may be poison."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol

from .request import Request
from .routers import Router

# Requests that were being served when their replica died start anew one by one: if one of them kills again, it is known
# which. After at most this many seconds without harm the next one may start beside it. Where more than this many come
# into question they start in small groups, at the price of one more death if the killer is among them.
ISOLATION = 1.0
SMALL_CROWD = 16
# How long such a request waits for a component whose thread is free, and how often that is looked at.
LINE_PATIENCE = 10.0
LOOK_EVERY = 0.1
# Sessions that were opened without a block to close them are forgotten beyond this many, the oldest first.
MOST_SESSIONS = 65_536


class Place(Protocol):
    """A replica as the dispatcher sees it."""

    index: int
    served: int
    flights: set[Request]

    @property
    def in_flight(self) -> int: ...
    @property
    def alive(self) -> bool: ...
    def enter(self, request: Request) -> None:
        """The request is sent there now."""

    def leave(self, request: Request) -> None:
        """The request has its answer, or will get none there."""

    def has_line_for(self, request: Request) -> bool:
        """Whether the request would have to wait there for the component's thread."""

    def isolated(self, now: float, within: float, patience: float) -> int:
        """Requests that are being found out about in the same process, see `Request.isolated`."""


class Dispatcher:
    """Hands requests to the replicas that are up. Waiting requests are served in the order of their arrival, except
    that one which waits for a certain replica lets others pass.

    Args:
        router: chooses among the replicas with room.
        max_in_flight: most requests at one replica.
    """

    def __init__(self, router: Router, max_in_flight: int) -> None:
        self.router, self.max_in_flight = router, max_in_flight
        self.up: list[Place] = []
        self._sessions: OrderedDict[str, Place] = OrderedDict()
        self._queue: deque[tuple[Request, asyncio.Future[Place]]] = deque()
        self._closed: Callable[[], BaseException] | None = None
        self._emptied: dict[int, asyncio.Event] = {}
        self._later: asyncio.TimerHandle | None = None

    @property
    def queued(self) -> int:
        """Requests that wait for a replica."""
        return len(self._queue)

    def waiting(self) -> list[Request]:
        return [request for request, _ in self._queue]

    def join(self, place: Place) -> None:
        """A replica serves from now on."""
        self.up.append(place)
        self._settle()

    def leave(self, place: Place) -> None:
        """A replica serves no further requests. Its sessions move on with their next call."""
        if place in self.up:
            self.up.remove(place)

    async def drain(self, place: Place, patience: float) -> None:
        """Let a replica finish what it has begun, and nothing more; return after `patience` seconds in any case."""
        self.leave(place)
        emptied = self._emptied[id(place)] = asyncio.Event()
        try:
            async with asyncio.timeout(patience):
                while place.flights:
                    emptied.clear()
                    await emptied.wait()
        except TimeoutError:
            return
        finally:
            del self._emptied[id(place)]

    def close(self, error: Callable[[], BaseException]) -> None:
        """No replica will ever come up again: whoever waits, or comes later, gets what `error` makes."""
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
        self._sessions.pop(session, None)

    async def acquire(self, request: Request) -> Place:
        """Wait for a replica and enter the request there; the caller must `release` it.

        Raises:
            TimeoutError: the request's time limit passed.
            what `close` was given.
        """
        self.check_open()
        place = self._choose(request)
        if place is not None:
            place.enter(request)
            return place
        waiter: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self._queue.append((request, waiter))
        try:
            async with asyncio.timeout(request.left):
                return await waiter
        except BaseException:
            if not waiter.done() or waiter.cancelled():
                if (request, waiter) in self._queue:  # unless it was closed meanwhile
                    self._queue.remove((request, waiter))
            elif waiter.exception() is None:  # given a place at the moment when it stopped waiting
                self.release(waiter.result(), request)
            raise

    def release(self, place: Place, request: Request) -> None:
        """The request has its answer, or will get none here."""
        place.leave(request)
        if not place.flights and id(place) in self._emptied:
            self._emptied[id(place)].set()
        self._settle()

    def _settle(self) -> None:
        """Give waiting requests to the replicas that have room."""
        held: deque[tuple[Request, asyncio.Future[Place]]] = deque()
        while self._queue and any(map(self._has_room, self.up)):
            request, waiter = self._queue.popleft()
            if waiter.done():
                held.append((request, waiter))  # stopped waiting, and is about to take itself out
                continue
            try:
                place = self._choose(request)
            except Exception as error:  # of the user's router: it belongs to the caller
                waiter.set_exception(error)
                continue
            if place is None:
                held.append((request, waiter))
            else:
                place.enter(request)
                waiter.set_result(place)
        self._queue.extendleft(reversed(held))

    def _choose(self, request: Request) -> Place | None:
        """The replica for this request, or None if it must wait."""
        if request.session is not None:
            held = self._sessions.get(request.session)
            if held is not None and held.alive and held in self.up:
                self._sessions.move_to_end(request.session)
                return held if self._has_room(held) else None
        free = [place for place in self.up if self._has_room(place)]
        if request.deaths:
            together = 1 if request.crowd <= SMALL_CROWD else request.crowd // 8
            now = time.monotonic()
            alone = [place for place in free if place.isolated(now, ISOLATION, LINE_PATIENCE) < together]
            # Behind another call in a component's thread nobody could tell which of the two it was that killed.
            at_once = [place for place in alone if not place.has_line_for(request)]
            free = at_once or (alone if now - request.lost > LINE_PATIENCE else [])
            if not free:
                self._look_again()
        free = [place for place in free if place.index not in request.avoid] or free
        if not free:
            return None
        chosen = self.router(free, request)
        if not any(chosen is place for place in free):
            raise TypeError(f"the router returned {chosen!r}, which is none of the candidates that it was given")
        if request.session is not None:
            self._sessions[request.session] = chosen
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return chosen

    def _look_again(self) -> None:
        """Isolation ends by itself, and maybe in another service of the same process: nobody tells."""
        if self._later is None:
            self._later = asyncio.get_running_loop().call_later(LOOK_EVERY, self._look)

    def _look(self) -> None:
        self._later = None
        self._settle()

    def _has_room(self, place: Place) -> bool:
        # A replica that has just died stays in the list for a moment, until its slot takes it out.
        return place.alive and place.in_flight < self.max_in_flight
