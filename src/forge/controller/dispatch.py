"""Which replica serves which request, and when: room, sessions, and care with requests that may be poison."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from typing import Protocol

from .request import MARGIN, Request
from .routers import Router

# Requests that were being served when their replica died start anew one by one: if one of them kills again, it is known
# which. After at most this many seconds without harm the next one may start beside it. Where more than this many come
# into question they start in small groups, at the price of one more death if the killer is among them.
ISOLATION = 1.0
SMALL_CROWD = 16
# Sessions that were opened without a block to close them are forgotten beyond this many, the oldest first.
MOST_SESSIONS = 65_536


class Place(Protocol):
    """A replica as the dispatcher sees it."""

    index: int
    served: int
    flights: dict[str, Request]

    @property
    def in_flight(self) -> int: ...
    @property
    def alive(self) -> bool: ...


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
        self._closed: BaseException | None = None
        self._emptied: dict[int, asyncio.Event] = {}

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
        if place.flights:
            await asyncio.wait([asyncio.ensure_future(emptied.wait())], timeout=patience)
        del self._emptied[id(place)]

    def close(self, error: BaseException) -> None:
        """No replica will ever come up again: whoever waits, or comes later, gets `error`."""
        self._closed = error
        for _, waiter in self._queue:
            if not waiter.done():
                waiter.set_exception(error)
        self._queue.clear()

    def end_session(self, session: str) -> None:
        self._sessions.pop(session, None)

    async def acquire(self, request: Request) -> Place:
        """Wait for a replica and enter the request there; the caller must `release` it.

        Raises:
            TimeoutError: the request's time limit passed.
            what `close` was given.
        """
        if self._closed is not None:
            raise self._closed
        place = self._choose(request)
        if place is not None:
            return self._enter(place, request)
        waiter: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self._queue.append((request, waiter))
        try:
            async with asyncio.timeout(request.left):
                return await waiter
        except BaseException:
            if not waiter.done() or waiter.cancelled():
                self._queue.remove((request, waiter))
            elif waiter.exception() is None:  # given a place at the moment when it stopped waiting
                self.release(waiter.result(), request)
            raise

    def release(self, place: Place, request: Request) -> None:
        """The request has its answer, or will get none here."""
        place.flights.pop(request.id, None)
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
                waiter.set_result(self._enter(place, request))
        self._queue.extendleft(reversed(held))

    def _enter(self, place: Place, request: Request) -> Place:
        request.sent = time.monotonic()
        request.attempts += 1
        place.flights[request.id] = request
        if request.deaths:
            isolated = min(ISOLATION, request.fatal_age + MARGIN)
            asyncio.get_running_loop().call_later(isolated + 0.01, self._settle)
        return place

    def _choose(self, request: Request) -> Place | None:
        """The replica for this request, or None if it must wait."""
        if request.session is not None:
            held = self._sessions.get(request.session)
            if held is not None and held.alive and held in self.up:
                return held if self._has_room(held) else None
        free = [place for place in self.up if self._has_room(place)]
        if request.deaths:
            together = 1 if request.crowd <= SMALL_CROWD else request.crowd // 8
            free = [place for place in free if _isolated(place) < together]
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

    def _has_room(self, place: Place) -> bool:
        # A replica that has just died stays in the list for a moment, until its slot takes it out.
        return place.alive and place.in_flight < self.max_in_flight


def _isolated(place: Place) -> int:
    """Requests there that are being found out about."""
    now = time.monotonic()
    return sum(flight.suspected(now) and now - flight.sent < ISOLATION for flight in place.flights.values())
