"""One incarnation of a replica: starts a component in its processes, sends calls to it, and notices its end."""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle

from ._monarch import ActorError, SupervisionError
from .actor_host import Answer
from .errors import CallTimeout, RemoteError, RemoteFailure, RemoteTraceback, ReplicaDied
from .options import Options
from .patience import wait_for
from .processes import ProcessGroup
from .types import ActorContext, Kwargs, Request, Value, keep_until_done

log = logging.getLogger(__name__)

# Time limits of messages to a process that may be stuck, in seconds.
TEARDOWN_PATIENCE = 5.0  # of a `Patience`, which a busy machine does not shorten
DRAIN_TIMEOUT = 120.0  # a profile may have to be written before the metrics are returned
CANCEL_TIMEOUT = 5.0  # only a message and its answer
BORROWED_TIMEOUT = 60.0  # for the first message to a user's processes

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Component:
    """Component that every replica of a service builds: its class, arguments and placement."""

    name: str
    cls: type[Any]  # a subclass of ForgeActor
    options: Options
    args: tuple
    kwargs: Kwargs


class Replica:
    """Group of `options.procs` processes that act as one: a call goes to every rank, and the value of rank 0 is
    returned.

    Args:
        index: the replica's index in its service, which its replacements keep.
        incarnation: number of replicas that this one replaces at its index, one after the other.
        group: the processes.
    """

    def __init__(self, component: Component, index: int, incarnation: int, group: ProcessGroup) -> None:
        self.component = component
        self.options = component.options
        self.group, self.index = group, index
        self.context = ActorContext(component.name, index, 0, self.options.procs, incarnation=incarnation)
        self.requests: set[Request] = set()  # in flight
        self.served = 0
        self.errors = 0  # requests that raised, or had no answer in time
        self.answers: deque[tuple[float, float]] = deque(maxlen=512)  # when each came, and the seconds it took
        self.last_answer = time.monotonic()

        # Set by `fail`: the error, whether no request can be the cause, how many were in flight, which may be the
        # cause.
        self.failed: asyncio.Future[ReplicaDied] = asyncio.get_running_loop().create_future()
        self.blameless = False
        self.in_flight_lost = 0
        self.suspects: set[Request] = set()

        self._abandoning: set[asyncio.Task] = set()
        self._answers: set[asyncio.Future[Value]] = set()
        self.number = next(_numbers)  # the key of its component in the `ActorHost` of each process

        # A light replica lives in one process of its group.
        self.process_index = index % group.procs if self.options.procs < group.procs else None
        self.actor_host: Any = group.actor_host
        if self.process_index is not None:
            self.actor_host = group.actor_host.slice(procs=self.process_index)

    def __str__(self) -> str:
        return f"{self.component.name}[{self.index}]"

    @property
    def in_flight(self) -> int:
        """Return the number of requests that were sent and not answered yet."""
        return len(self.requests)

    @property
    def alive(self) -> bool:
        """Return whether the replica has not failed so far."""
        return not self.failed.done()

    @property
    def pids(self) -> list[int]:
        """Return the replica's process ids, one per rank, each on its own host."""
        return self.group.pids

    @property
    def location(self) -> str:
        """Return its process ids, with their machines, as text for messages; "unknown" before it has started."""
        return ", ".join(map(str, self.group.processes)) or "unknown"

    async def start(self) -> None:
        """Build the component on every rank, and wait until it is ready to serve.

        Raises:
            CallTimeout: it was not ready within `options.setup_timeout` seconds.
            ReplicaDied: a process was lost, or none could be started.
            Exception: what the component's `__init__`, `setup` or `on_respawn` raised.
        """
        limit = self.options.setup_timeout
        definition = cloudpickle.dumps((self.component.cls, self.component.args, self.component.kwargs))
        self.group.starting += 1
        self.group.members.append(self)  # before its processes start: their host may be lost meanwhile

        try:
            # The first message returns once every process is up, and says which processes to watch. To a user's process
            # that ended earlier it would wait for the whole limit, as Monarch does not report such an end.
            first_limit = min(limit, BORROWED_TIMEOUT) if self.group.hosts.borrowed else limit
            try:
                processes = await self._ask_ranks("start", first_limit, "ping")
            except ReplicaDied as error:
                raise ReplicaDied(f"{self} did not start: {error}") from error
            self.group.watch(processes)

            # A new meeting point for each incarnation: the old one may hold the addresses of dead ranks.
            if self.options.procs > 1:
                self.context = replace(self.context, rendezvous=await self.group.hosts.rendezvous())

            await self._ask_ranks("setup", limit, "start", self.number, self.context, definition)
        finally:
            self.group.starting -= 1

    def enter(self, request: Request) -> None:
        """Count a request as in flight on this replica, before it is sent."""
        request.send()
        self.requests.add(request)

    def leave(self, request: Request) -> None:
        """Count a request as no longer in flight on this replica, whether it was answered or not."""
        self.requests.discard(request)

    async def serve(self, request: Request, limit: float | None = None) -> list[Value]:
        """Call the endpoint of a request that has entered, on every rank; return the values in rank order.

        Args:
            limit: seconds, for a call that a starting replica catches up on; None: the remaining time of the request.

        Raises:
            CallTimeout: no answer within the limit.
            ReplicaDied: the replica is lost.
            Exception: what the endpoint raised.
        """
        message = (self.number, request.token, request.id, request.endpoint, request.args, request.kwargs)
        try:
            timeout = request.time_left if limit is None else limit
            values = await self._ask_ranks(request.endpoint, timeout, "invoke", *message)
        except CallTimeout as error:
            self.errors += 1
            await self._abandon_request(request)  # its caller has stopped waiting
            raise CallTimeout(f"{request.caller} timed out: {error}") from None
        except asyncio.CancelledError:
            if self.alive:
                keep_until_done(self._abandoning, asyncio.create_task(self._abandon_request(request)))
            raise
        except Exception:
            self.errors += 1
            raise

        self.last_answer = time.monotonic()

        # Calls that a starting replica catches up on are not counted as traffic.
        if limit is None:
            self.served += 1
            self.answers.append((self.last_answer, self.last_answer - request.sent))

        return values

    async def drain_metrics(self, profiles: Mapping[str, str]) -> list[Value]:
        """Return the metrics that each rank recorded since the last call, see `ActorHost.drain_metrics`."""
        return await self._ask_ranks("drain_metrics", DRAIN_TIMEOUT, "drain_metrics", profiles)

    async def ping(self) -> None:
        """Return once every rank has answered a ping, or the replica is lost."""
        with suppress(ReplicaDied):
            await self._ask_ranks("ping", None, "ping")

    def fail(self, reason: str, *, blameless: bool = False) -> ReplicaDied:
        """Mark this replica as dead, and end every call in flight on it; return the error that these calls raise.

        The first reason stays.

        Args:
            blameless: no request can be the cause of its death.
        """
        if not self.failed.done():
            self.blameless = blameless or self.group.stopped_by_signal
            self.in_flight_lost = len(self.requests)
            # Any request may have killed it, unless some are suspects of an earlier death: then only these.
            self.suspects = {request for request in self.requests if request.deaths} or {*self.requests}
            self.failed.set_result(ReplicaDied(f"{self} is dead (pid {self.location}): {reason}"))
            for reply in list(self._answers):
                reply.cancel()
        return self.failed.result()

    async def stop(self) -> None:
        """Run the component's `teardown`, and stop the replica's processes unless other replicas share them."""
        if self.alive:
            try:
                closing = self._ask_ranks("teardown", None, "close", self.number)
                await wait_for(closing, self.group.processes, TEARDOWN_PATIENCE)
            except TimeoutError:
                log.warning("%s: teardown gave no answer within %g s (pid %s)", self, TEARDOWN_PATIENCE, self.location)
            except Exception as error:
                # The replica is stopped all the same.
                log.warning("%s: teardown failed: %s", self, error)
            self.fail("it was stopped", blameless=True)

        if self in self.group.members:
            self.group.members.remove(self)
        if not self.group.shared or not (self.group.members or self.group.starting):
            await self.group.stop()

    async def _abandon_request(self, request: Request) -> None:
        """Stop work on a request whose caller has stopped waiting.

        A plain endpoint that has started cannot be stopped: it may run until the component's own `call_timeout`. Then
        the replica counts as hung, because nothing else can run in its thread.
        """

        async def cancel_work() -> bool:
            label = f"cancel of {request.endpoint}"
            try:
                return all(await self._ask_ranks(label, CANCEL_TIMEOUT, "cancel", request.token))
            except (ReplicaDied, CallTimeout):
                return True  # a replica that does not even answer this is noticed by its pings

        async def fail_if_running() -> None:
            if not await cancel_work():
                self.group.fail(f"{request.endpoint} ran past call_timeout ({self.options.call_timeout:g} s)")

        if not await cancel_work():
            remaining = max(0.0, self.options.call_timeout - (time.monotonic() - request.sent))
            asyncio.get_running_loop().call_later(remaining, lambda: asyncio.ensure_future(fail_if_running()))

    async def _ask_ranks(self, label: str, limit: float | None, endpoint: str, *args: object) -> list[Value]:
        """Call an endpoint of the `ActorHost` of every rank and return the values in rank order.

        The first failure of a rank is raised at once: other ranks may be stuck in a collective with it.

        Args:
            label: name of the message in errors.
            limit: seconds; None waits without a limit.

        Raises:
            CallTimeout: not all ranks answered within the limit.
            ReplicaDied: the replica is lost, before or meanwhile.
            RemoteError: the message could not be unpickled, or its answer not be pickled.
            Exception: what a rank raised.
        """
        if self.failed.done():
            raise ReplicaDied(f"{self.failed.result()} (before {label} was sent)")

        send = getattr(self.actor_host, endpoint)
        if self.options.procs == 1:
            reply = send.call_one(*args).as_asyncio()
        else:
            reply = asyncio.ensure_future(self._gather_answers([reply.as_asyncio() for reply in send.stream(*args)]))

        # A CancelledError below comes from `fail`, which cancels replies, or from a caller that cancels this task. Only
        # the second one raises the task's count of cancellations.
        task = asyncio.current_task()
        cancellations_before = task.cancelling() if task else 0
        self._answers.add(reply)

        try:
            async with asyncio.timeout(limit):
                answers: list[Answer] = [await reply] if self.options.procs == 1 else await reply
        except TimeoutError:
            raise CallTimeout(
                f"{self}.{label} gave no answer within {round(limit or 0.0, 1):g} s (pid {self.location})"
            ) from None
        except asyncio.CancelledError:
            if self.failed.done() and (task is None or task.cancelling() == cancellations_before):
                raise ReplicaDied(f"{self.failed.result()} (while {label} was in flight)") from None
            raise
        except SupervisionError as error:
            reason = f"its process ended or stopped answering (seen while {label} was in flight: {_last_line(error)})"
            self.group.fail(reason)
            raise self.fail(reason) from error
        except ValueError as error:
            if "error spawning proc mesh" not in str(error) and "error creating proc" not in str(error):
                raise
            # Monarch gives up a process that has not called back 30 s after its start.
            reason = f"Monarch gave up its start, after at most 30 s; its output may say why ({str(error)[:80]})"
            raise self.fail(reason, blameless=True) from None
        except ActorError as error:
            # The message could not be unpickled, or its answer not be pickled. The actor lives.
            text = str(error).strip()
            raise RemoteError(
                f"{self}.{label} failed, because the call or its result could not be sent: {_last_line(error)}"
            ) from RemoteTraceback(text)
        finally:
            self._answers.discard(reply)
            # A late exception must be retrieved, or asyncio logs it.
            reply.add_done_callback(lambda late: late.cancelled() or late.exception())
            reply.cancel()

        for _, value in answers:
            if isinstance(value, RemoteFailure):
                raise value.to_exception()
        return [value for _, value in answers]

    async def _gather_answers(self, replies: list[asyncio.Future[Answer]]) -> list[Answer]:
        """Return the answers of all ranks in rank order, or only the first failure, as a list of one answer."""
        answers = []
        try:
            for reply in asyncio.as_completed(replies):
                answers.append(await reply)
                # A rank whose peer dies raises as well, often before the controller knows of the death. With this pause
                # the death is noticed, which cancels this task, and the call ends with ReplicaDied.
                if isinstance(answers[-1][1], RemoteFailure):
                    await asyncio.wait(replies, timeout=self.group.hosts.notice_after)
                    return answers[-1:]
        finally:
            for reply in replies:
                reply.cancel()
        return sorted(answers, key=lambda answer: answer[0])


def _last_line(error: Exception) -> str:
    """Return the last line of a Monarch error, which follows the traceback; the error's class if there is no text."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
