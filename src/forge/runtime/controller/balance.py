"""Assign requests to replicas: capacity, sessions, and groups of requests that may have killed one."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

from .replica import Replica
from .routers import Router
from .types import Request

# Sessions kept: a session that was opened by id, without a block, is never closed. The oldest are forgotten first.
MAX_SESSIONS = 65_536

Waiter = tuple[Request, "asyncio.Future[Replica]"]


class LoadBalancer:
    """Load balancer that assigns requests to serving replicas in the order of arrival.

    A request that must wait for one certain replica, because of its session, does not hold up the requests behind it.

    Args:
        router: chooses one of the replicas that have fewer than `max_in_flight` requests.
        max_in_flight: maximum number of requests at one replica.
    """

    def __init__(self, router: Router, max_in_flight: int) -> None:
        self.router, self.max_in_flight = router, max_in_flight
        self.up: list[Replica] = []
        self.sessions: OrderedDict[str, Replica] = OrderedDict()  # the replica of each session
        self._queue: deque[Waiter] = deque()
        self._closed: Callable[[], BaseException] | None = None
        self._drained: dict[int, asyncio.Event] = {}

    @property
    def queued(self) -> list[Request]:
        """Return the requests that wait for a replica, in the order of their arrival."""
        return [request for request, _ in self._queue]

    def join(self, replica: Replica) -> None:
        """Add a replica that serves from now on."""
        self.up.append(replica)
        self._assign_waiting()

    def leave(self, replica: Replica) -> None:
        """Remove a replica: it gets no more requests, and its sessions move to other replicas with their next call."""
        if replica in self.up:
            self.up.remove(replica)

    async def drain(self, replica: Replica, timeout: float) -> None:
        """Stop sending requests to a replica, and wait at most `timeout` seconds until it has finished those in
        flight."""
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
        """Reject all waiting and future requests with the exception that `error()` returns: the service has ended."""
        self._closed = error
        for _, waiter in self._queue:
            if not waiter.done():
                waiter.set_exception(error())
        self._queue.clear()

    def check_open(self) -> None:
        """Raise the exception that was given to `close`, if it was called."""
        if self._closed is not None:
            raise self._closed()

    def end_session(self, session: str) -> None:
        """Forget which replica a session goes to."""
        self.sessions.pop(session, None)

    async def acquire(self, request: Request) -> Replica:
        """Wait until a replica is assigned to the request; return it with the request entered.

        The caller must `release` the request afterwards.

        Raises:
            TimeoutError: the request's time limit passed.
            Exception: the exception given to `close`, or what the user's router raised.
        """
        self.check_open()
        if (replica := self._choose_replica(request)) is not None:
            replica.enter(request)
            return replica

        waiter: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        self._queue.append((request, waiter))

        try:
            async with asyncio.timeout(request.time_left):
                return await waiter
        except BaseException:
            # The caller stops waiting. A replica that was assigned to it just before is given back.
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(waiter.result(), request)
            elif (request, waiter) in self._queue:  # not if `close` emptied the queue
                self._queue.remove((request, waiter))
            raise

    def release(self, replica: Replica, request: Request) -> None:
        """Remove a request from its replica, whether it was answered or not, and assign the next ones."""
        replica.leave(request)
        if not replica.requests and id(replica) in self._drained:
            self._drained[id(replica)].set()
        self._assign_waiting()

    def _assign_waiting(self) -> None:
        """Assign waiting requests, in the order of their arrival, while a replica has room."""
        still_waiting: deque[Waiter] = deque()
        while self._queue and any(map(self._has_room, self.up)):
            request, waiter = self._queue.popleft()
            if waiter.done():  # its caller stopped waiting, and removes it from the queue in a moment
                still_waiting.append((request, waiter))
                continue
            try:
                replica = self._choose_replica(request)
            except Exception as error:  # of the user's router: the caller gets it
                waiter.set_exception(error)
                continue

            if replica is None:
                still_waiting.append((request, waiter))
            else:
                replica.enter(request)
                waiter.set_result(replica)

        self._queue.extendleft(reversed(still_waiting))  # to the front, in the same order

    def _choose_replica(self, request: Request) -> Replica | None:
        """Return the replica for this request, or None if it must wait."""
        # A session stays with its replica while that serves, even if the replica is full and others are idle.
        if request.session is not None:
            session_replica = self.sessions.get(request.session)
            if session_replica is not None and session_replica.alive and session_replica in self.up:
                self.sessions.move_to_end(request.session)
                return session_replica if self._has_room(session_replica) else None

        # Requests that may have killed a replica are sent in groups of an eighth, see `forge.runtime.controller.types`.
        candidates = [replica for replica in self.up if self._has_room(replica)]
        if request.deaths:
            group_size = max(1, request.suspects // 8)
            candidates = [
                replica for replica in candidates if sum(other.deaths > 0 for other in replica.requests) < group_size
            ]

        # A replica that died with this request may have died by itself: another one is the better try, if there is one.
        candidates = [replica for replica in candidates if replica.index not in request.avoid] or candidates
        if not candidates:
            return None

        choice = self.router(candidates, request)
        if not any(choice is replica for replica in candidates):
            raise TypeError(f"the router returned {choice!r}, but it must return one of the given candidates")

        if request.session is not None:
            self.sessions[request.session] = choice
            if len(self.sessions) > MAX_SESSIONS:
                self.sessions.popitem(last=False)

        return choice

    def _has_room(self, replica: Replica) -> bool:
        # A replica that has just died stays in the list for a moment, until its supervisor removes it.
        return replica.alive and replica.in_flight < self.max_in_flight
