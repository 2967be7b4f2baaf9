"""One incarnation of a replica: a component built in its processes, the calls in flight on it, and its end."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle

from ..cluster.wire import LEASE
from ._monarch import ActorError, SupervisionError
from .actor_host import Answer
from .context import ActorContext
from .errors import CallTimeout, RemoteError, RemoteFailure, RemoteTraceback, ReplicaDied
from .options import Options
from .patience import wait_for
from .processes import ProcessGroup
from .request import Request

log = logging.getLogger(__name__)

# Seconds, as of `Patience`, that a component may take over its teardown.
TEARDOWN_PATIENCE = 5.0
DRAINING = 120.0  # seconds, in which a profile may have to be written
CANCEL_PATIENCE = 5.0  # seconds in which a process answers that it cancelled a call

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Component:
    """What every replica of a service is: a class with its arguments, and where it is placed."""

    name: str
    cls: type[Any]
    options: Options
    args: tuple
    kwargs: dict[str, Any]
    plain: frozenset[str] = frozenset()  # endpoints that run in the component's thread


class Replica:
    """`options.procs` processes that act as one: a call goes to every rank, rank 0 speaks for all."""

    def __init__(self, component: Component, index: int, incarnation: int, group: ProcessGroup) -> None:
        self.component, self.options, self.group, self.index = component, component.options, group, index
        self.context = ActorContext(component.name, index, 0, self.options.procs, incarnation=incarnation)
        self.requests: set[Request] = set()  # in flight
        self._in_line: deque[Request] = deque()  # for the component's thread, in the order of their calls
        self.served = 0
        self.latencies: deque[float] = deque(maxlen=512)
        self.last_answer = time.monotonic()
        self.failed: asyncio.Future[ReplicaDied] = asyncio.get_running_loop().create_future()
        self.blameless = False
        self.died, self.in_flight_lost = 0.0, 0
        self.suspects: set[Request] = set()
        self._abandoning: set[asyncio.Task] = set()
        self._answers: set[asyncio.Future[Any]] = set()
        self.number = next(_numbers)  # what it is known by in its processes
        # Which of the processes, if not all.
        self.place = index % group.procs if self.options.procs < group.procs else None
        self.actor_host = group.actor_host if self.place is None else group.actor_host.slice(procs=self.place)

    def __str__(self) -> str:
        return f"{self.component.name}[{self.index}]"

    @property
    def in_flight(self) -> int:
        """Number of requests that were sent and not answered."""
        return len(self.requests)

    @property
    def alive(self) -> bool:
        """Whether no failure has been noticed."""
        return not self.failed.done()

    @property
    def pids(self) -> list[int]:
        """On their machines."""
        return self.group.pids

    @property
    def where(self) -> str:
        """Its processes, for messages."""
        return ", ".join(map(str, self.group.processes)) or "unknown"

    async def start(self) -> None:
        """Build the component on every rank.

        Raises:
            the exception that the component's `__init__`, `setup` or `on_respawn` raised; CallTimeout or ReplicaDied.
        """
        limit = self.options.setup_timeout
        definition = cloudpickle.dumps((self.component.cls, self.component.args, self.component.kwargs))
        self.group.starting += 1
        self.group.members.append(self)  # before its processes are there: their host may be lost meanwhile
        try:
            try:
                self.group.watch(_unwrap(await self._all_ranks("start", limit, "ping")))
            except ReplicaDied as error:
                raise ReplicaDied(f"{self} did not come up: {error}") from error
            if self.options.procs > 1:
                self.context = replace(self.context, rendezvous=self.group.hosts.rendezvous())
            _unwrap(await self._all_ranks("setup", limit, "start", self.number, self.context, definition))
        finally:
            self.group.starting -= 1

    def enter(self, request: Request) -> None:
        """The request is sent here now."""
        request.send()
        self.requests.add(request)
        if request.endpoint in self.component.plain:
            self._in_line.append(request)
            if self._in_line[0] is not request:
                return
        request.began = request.sent

    def leave(self, request: Request) -> None:
        """The request has its answer, or will get none here."""
        self.requests.discard(request)
        if request in self._in_line:
            self._in_line.remove(request)
            if self._in_line and self._in_line[0].began is None:
                self._in_line[0].began = time.monotonic()

    def has_line_for(self, request: Request) -> bool:
        """Whether the request would have to wait here for the component's thread."""
        return request.endpoint in self.component.plain and bool(self._in_line)

    def isolated(self, now: float, within: float, patience: float) -> int:
        """Requests in these processes, this component's or another's, that are `Request.isolated`."""
        return sum(r.isolated(now, within, patience) for member in self.group.members for r in member.requests)

    async def serve(self, request: Request, limit: float | None = None) -> list[Any]:
        """Call the endpoint of a request that has entered on every rank; their values in rank order.

        Raises:
            what the endpoint raised, ReplicaDied, or CallTimeout after the request's time limit.
        """
        message = (self.number, request.token, request.id, request.endpoint, request.args, request.kwargs)
        try:
            within = request.left if limit is None else limit
            if request.cast is not None and request.attempts == 1:
                answer = await self._wait(request.endpoint, request.cast.send(self, request), within)
                values = [answer[1]]
            else:
                values = await self._all_ranks(request.endpoint, within, "invoke", *message)
        except CallTimeout as error:
            await self._abandon(request)
            raise CallTimeout(f"{request.caller} timed out: {error}") from None
        except asyncio.CancelledError:
            if self.alive:
                task = asyncio.get_running_loop().create_task(self._abandon(request))
                self._abandoning.add(task)
                task.add_done_callback(self._abandoning.discard)
            raise
        self.last_answer = time.monotonic()
        if limit is None:
            self.served += 1
            self.latencies.append(self.last_answer - request.sent)
        return _unwrap(values)

    async def drain_metrics(self, profiles: Mapping[str, str]) -> list[Any]:
        """Metrics of all ranks since the last call."""
        return _unwrap(await self._all_ranks("drain_metrics", DRAINING, "drain_metrics", profiles))

    async def ping(self, patience: float) -> bool:
        """Whether every rank answers in time."""
        try:
            await self._all_ranks("ping", patience, "ping")
        except CallTimeout:
            return False
        except ReplicaDied:
            return True  # known already
        return True

    def fail(self, reason: str, *, blameless: bool = False) -> ReplicaDied:
        """Declare this replica dead: every call in flight on it ends now.

        Args:
            blameless: what happened cannot be the doing of a request.
        """
        if not self.failed.done():
            self.blameless = blameless or self.group.stopped_by_signal
            self.died, self.in_flight_lost = time.monotonic(), len(self.requests)
            self.suspects = suspects(self.group.members if self.group.dead else [self], self.died)
            self.failed.set_result(ReplicaDied(f"{self} is dead (pid {self.where}): {reason}"))
            for answer in list(self._answers):
                answer.cancel()
        return self.failed.result()

    async def stop(self) -> None:
        """Run `teardown`, and end the processes unless others live in them."""
        if self.alive:
            try:
                closing = self._all_ranks("teardown", None, "close", self.number)
                _unwrap(await wait_for(closing, self.group.local_pids, TEARDOWN_PATIENCE))
            except TimeoutError:
                log.warning("%s: teardown gave no answer within %g s (pid %s)", self, TEARDOWN_PATIENCE, self.where)
            except Exception as error:
                # The replica is stopped all the same.
                log.warning("%s: teardown failed: %s", self, error)
            self.fail("it was stopped", blameless=True)
        if self in self.group.members:
            self.group.members.remove(self)
        if not self.group.shared or not (self.group.members or self.group.starting):
            await self.group.stop()

    async def _abandon(self, request: Request) -> None:
        """Stop work on a request that ran out of time. Work that cannot be stopped may go on until the component's own
        `call_timeout`; then the replica counts as hung, because nothing else could ever run in its thread."""

        async def cancelled() -> bool:
            label = f"cancel of {request.endpoint}"
            try:
                return all(await self._all_ranks(label, CANCEL_PATIENCE, "cancel", request.token))
            except (ReplicaDied, CallTimeout):
                return True  # a replica that does not even answer this is left to the ping

        async def give_up() -> None:
            if not await cancelled():
                self.group.fail(f"{request.endpoint} ran past call_timeout ({self.options.call_timeout:g} s)")

        if not await cancelled():
            left = max(0.0, self.options.call_timeout - (time.monotonic() - request.sent))
            asyncio.get_running_loop().call_later(left, lambda: asyncio.ensure_future(give_up()))

    async def _all_ranks(self, label: str, limit: float | None, endpoint: str, *args: Any) -> list[Any]:
        """One message to every rank; the values in rank order, or one RemoteFailure. The first failure ends the wait
        for the others, which may be stuck in a collective with the rank that failed."""
        send = getattr(self.actor_host, endpoint)
        if self.options.procs == 1:
            return [(await self._wait(label, send.call_one(*args).as_asyncio(), limit))[1]]
        answers: list[asyncio.Future[Answer]] = [answer.as_asyncio() for answer in send.stream(*args)]

        # A rank whose peer dies raises as well, often before the death is known here: it is a death then, no error.
        noticed = LEASE + 1.0 if self.group.hosts.spans_machines else 1.0

        async def in_rank_order() -> list[Any]:
            by_rank = {}
            try:
                for answer in asyncio.as_completed(answers):
                    rank, by_rank[rank] = await answer
                    if isinstance(by_rank[rank], RemoteFailure):
                        await asyncio.wait(answers, timeout=noticed)
                        return [by_rank[rank]]
            finally:
                for answer in answers:
                    answer.cancel()
            return [by_rank[rank] for rank in sorted(by_rank)]

        return await self._wait(label, asyncio.ensure_future(in_rank_order()), limit)

    async def _wait(self, label: str, answer: asyncio.Future[Any], limit: float | None) -> Any:
        """Wait for `answer`, the replica's failure, or the time limit, whichever is first."""
        if self.failed.done():
            answer.cancel()
            raise ReplicaDied(f"{self.failed.result()} (before {label} was sent)")
        task = asyncio.current_task()
        cancelling = task.cancelling() if task else 0
        self._answers.add(answer)
        try:
            async with asyncio.timeout(limit):
                return await answer
        except TimeoutError:
            raise CallTimeout(
                f"{self}.{label} gave no answer within {round(limit or 0.0, 1):g} s (pid {self.where})"
            ) from None
        except asyncio.CancelledError:
            if self.failed.done() and (task is None or task.cancelling() == cancelling):
                raise ReplicaDied(f"{self.failed.result()} (while {label} was in flight)") from None
            raise
        except SupervisionError as error:
            self.group.fail(f"its process ended or stopped answering (seen while {label} was in flight)")
            raise self.fail("its process ended or stopped answering") from error
        except ValueError as error:
            if "error spawning proc mesh" not in str(error):
                raise
            # Monarch waits for no process that has not called back 30 s after its start.
            raise self.fail("Monarch gave up its start", blameless=True) from None
        except ActorError as error:
            # The message could not be read there, or its answer not be sent back. The actor lives.
            text = str(error).strip()
            summary = text.splitlines()[-1] if text else type(error).__name__
            raise RemoteError(f"{self}.{label} could not be called or answered: {summary}") from RemoteTraceback(text)
        finally:
            self._answers.discard(answer)
            # A late failure of an answer that is no longer awaited would be logged as an exception never retrieved.
            answer.add_done_callback(lambda late: late.cancelled() or late.exception())
            answer.cancel()


def suspects(replicas: Sequence[Replica], now: float) -> set[Request]:
    """The requests that may have caused the death of a process: those that an earlier death accuses, if any, else all
    that were being worked on."""
    begun = {request for replica in replicas for request in replica.requests if request.began is not None}
    return {request for request in begun if request.accused(now)} or begun


def _unwrap(values: list[Any]) -> list[Any]:
    """The values; or raise what the component raised."""
    for value in values:
        if isinstance(value, RemoteFailure):
            raise value.to_exception()
    return values
