"""Assign requests to replicas: capacity, sessions, and groups of requests that may have killed one."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

from .replica import Replica
from .routers import Router
from .types import Request

# Sessions that were opened without a block to close them are forgotten beyond this many, the oldest first.
MAX_SESSIONS = 65_536

Waiter = tuple[Request, "asyncio.Future[Replica]"]


class LoadBalancer:
    """Assigns requests to the replicas that serve, first come first served; a request that waits for a certain replica
    lets others pass.

    Args:
        router: chooses among the replicas with room.
        max_in_flight: maximum number of requests at one replica.
    """

    def __init__(self, router: Router, max_in_flight: int) -> None:
        self.router = router
        self.max_in_flight = max_in_flight
        self.up: list[Replica] = []
        self._sessions: OrderedDict[str, Replica] = OrderedDict()
        self._queue: deque[Waiter] = deque()
        self._closed: Callable[[], BaseException] | None = None
        self._drained: dict[int, asyncio.Event] = {}

    @property
    def queued(self) -> list[Request]:
        """Return requests that wait for a replica."""
        return [request for request, _ in self._queue]

    def join(self, replica: Replica) -> None:
        """Add a replica that serves from now on."""
        self.up.append(replica)
        self._assign_waiting()

    def leave(self, replica: Replica) -> None:
        """Remove a replica: it gets no additional requests. Its sessions move with their next call."""
        if replica in self.up:
            self.up.remove(replica)

    async def drain(self, replica: Replica, timeout: float) -> None:
        """Send a replica no more requests and wait until it has finished its own, at most `timeout` seconds."""
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
        """Fail present and later waiters with what `error` returns: no replica will serve again."""
        self._closed = error
        for _, waiter in self._queue:
            if not waiter.done():
                waiter.set_exception(error())
        self._queue.clear()

    def check_open(self) -> None:
        """Raise the error of `close`, if it was called."""
        if self._closed is not None:
            raise self._closed()

    def end_session(self, session: str) -> None:
        """Forget which replica a session goes to."""
        self._sessions.pop(session, None)

    async def acquire(self, request: Request) -> Replica:
        """Wait for a replica and enter the request at it; the caller must `release` it.

        Raises:
            TimeoutError: the request's time limit passed.
            the error of `close`.
        """
        self.check_open()
        replica = self._choose_replica(request)
        if replica is not None:
            replica.enter(request)
            return replica
        waiter: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        self._queue.append((request, waiter))

        try:
            async with asyncio.timeout(request.time_left):
                return await waiter
        except BaseException:
            if not waiter.done() or waiter.cancelled():
                if (request, waiter) in self._queue:  # not if `close` emptied the queue
                    self._queue.remove((request, waiter))
            elif waiter.exception() is None:  # a replica was assigned just before it stopped waiting
                self.release(waiter.result(), request)
            raise

    def release(self, replica: Replica, request: Request) -> None:
        """Remove a request that has its answer, or gets none from this replica."""
        replica.leave(request)
        if not replica.requests and id(replica) in self._drained:
            self._drained[id(replica)].set()
        self._assign_waiting()

    def _assign_waiting(self) -> None:
        """Assign waiting requests to the replicas that have room."""
        passed: deque[Waiter] = deque()  # those that must keep waiting, in their order
        while self._queue and any(map(self._has_room, self.up)):
            request, waiter = self._queue.popleft()
            if waiter.done():
                passed.append((request, waiter))  # it stopped waiting, and removes itself in a moment
                continue
            try:
                replica = self._choose_replica(request)
            except Exception as error:  # of the user's router: the caller gets it
                waiter.set_exception(error)
                continue

            if replica is None:
                passed.append((request, waiter))
            else:
                replica.enter(request)
                waiter.set_result(replica)

        self._queue.extendleft(reversed(passed))

    def _choose_replica(self, request: Request) -> Replica | None:
        """Return the replica for this request, or None if it must wait."""
        # A session stays with its replica while that serves, even if the replica is full and others are idle.
        if request.session is not None:
            home = self._sessions.get(request.session)
            if home is not None and home.alive and home in self.up:
                self._sessions.move_to_end(request.session)
                return home if self._has_room(home) else None

        free = [replica for replica in self.up if self._has_room(replica)]
        if request.deaths:
            most = max(1, request.suspects // 8)
            free = [replica for replica in free if sum(other.deaths > 0 for other in replica.requests) < most]

        # A replica that died with this request may have died by itself: another one is the better try.
        free = [replica for replica in free if replica.index not in request.avoid] or free
        if not free:
            return None
        choice = self.router(free, request)
        if not any(choice is replica for replica in free):
            raise TypeError(f"the router returned {choice!r}, which is none of the candidates that it was given")
        if request.session is not None:
            self._sessions[request.session] = choice
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

        return choice

    def _has_room(self, replica: Replica) -> bool:
        # A replica that has just died stays in the list for a moment, until its supervisor removes it.
        return replica.alive and replica.in_flight < self.max_in_flight
