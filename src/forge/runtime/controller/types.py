"""The messages between callers, services and replicas: a `Call`, the `Request` that a service makes of it, its status.

A dead process may have served many requests, and one of them may have killed it: all requests that it was working on
are suspects. They are sent again in groups of an eighth, so that the next death has fewer suspects. A request that is
the only suspect of its last death is not sent again.
"""

import asyncio
import contextvars
import itertools
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound="asyncio.Future[Any]")
SUDDEN = 1.0  # seconds; a request that ends its process mostly does so at once
Value = Any  # what an endpoint returned: anything that pickle carries
Kwargs = dict[str, Any]  # the keyword arguments of a call
Pending = Coroutine[Any, Any, T]  # a call that was written and is to be awaited

_numbers = itertools.count()


class RankValues(list[Value]):
    """The values of a call on all ranks, in rank order; `items` and `values` are those of Monarch's ValueMesh."""

    def items(self) -> Iterator[tuple[int, Value]]:
        """Return (rank, value) pairs."""
        return enumerate(self)

    def values(self) -> Iterator[Value]:
        """Return the values in rank order."""
        return iter(self)


_PACKAGE = os.path.dirname(__file__)


@dataclass(frozen=True, slots=True)
class Call:
    """Call of a service as written by the caller: verb, endpoint and arguments.

    Attributes:
        verb: "route", "fanout", "call" or "call_one".
        caller: the calling code, for errors: `function (file:line)`.
        timeout: seconds; None is the component's `call_timeout`.
        session: id of the session whose replica gets the call; None without a session.
        request_id: id for the request; None makes a new one.
    """

    verb: str
    endpoint: str
    args: tuple
    kwargs: Kwargs
    caller: str
    timeout: float | None = None
    session: str | None = None
    request_id: str | None = None


@dataclass(slots=True, eq=False)
class Request:
    """Call that is sent to replicas, with one `id` for all attempts and a new `token` for each attempt.

    Attributes (times on the monotonic clock, in seconds):
        limit: seconds after `created` until the call raises CallTimeout.
        created: when the call was made.
        sent: when it was last sent.
        attempts: number of times that it was sent.
        deaths: number of replicas whose death this request may have caused.
        sudden_deaths: number of those that died within SUDDEN of getting it.
        suspects: number of requests that may have caused the last of these deaths.
        avoid: indices of the replicas that died with it.
    """

    id: str
    endpoint: str
    args: tuple
    kwargs: Kwargs
    caller: str
    limit: float
    session: str | None = None
    created: float = field(default_factory=time.monotonic)
    token: int = 0
    sent: float = 0.0
    attempts: int = 0
    deaths: int = 0
    sudden_deaths: int = 0
    suspects: int = 0
    avoid: set[int] = field(default_factory=set)

    @property
    def time_left(self) -> float:
        """Return the seconds until its time limit, at least 0."""
        return max(0.0, self.created + self.limit - time.monotonic())

    def send(self) -> None:
        """Count another attempt, and set a new token for it."""
        self.token = next(_numbers)
        self.sent = time.monotonic()
        self.attempts += 1

    def record_death(self, suspects: "set[Request]") -> None:
        """Record that the request's replica died; no effect if the request is not among the `suspects` of the death."""
        if self in suspects:
            self.deaths += 1
            self.sudden_deaths += time.monotonic() - self.sent < SUDDEN
            self.suspects = len(suspects)


def new_id(service: str) -> str:
    """Return a new id for a request, unique within the run, e.g. "policy-1234-56"."""
    return f"{service}-{os.getpid()}-{next(_numbers)}"


def name_caller() -> str:
    """Return `function (file:line)` of the innermost code on the stack that is outside of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


_request: contextvars.ContextVar[str | None] = contextvars.ContextVar("forge_request", default=None)


@dataclass(frozen=True, slots=True)
class ActorContext:
    """Position of one process in a component: replica and rank.

    Attributes:
        component: the component's name.
        replica: index of the replica.
        rank: index of this process in its replica, from 0.
        world_size: number of processes of the replica.
        rendezvous: where the ranks of the replica meet, see `forge.runtime.process_groups.process_store`; None for a
            replica of one process.
        incarnation: number of replicas that this one replaces: 0 for the first, one more with each respawn.
    """

    component: str
    replica: int = 0
    rank: int = 0
    world_size: int = 1
    rendezvous: str | None = None
    incarnation: int = 0

    def __str__(self) -> str:
        rank = f" rank {self.rank}" if self.world_size > 1 else ""
        return f"{self.component}[{self.replica}]{rank}"


def request_id() -> str | None:
    """Return the id of the request that the calling endpoint serves; None outside of an endpoint.

    A request keeps its id when it is sent again because a replica was lost. An endpoint that must not act twice can
    store the id together with its effect.
    """
    return _request.get()


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """The state of one replica at one moment.

    Attributes:
        state: "starting", "up", "restarting", "failed" or "stopped".
        served: number of calls that returned a value.
        errors: number of calls that raised, or had no answer in time.
        rate: values a second in the last minute, of which the last 512 are counted.
        sessions: number of sessions whose calls it gets.
        latency_mean: of its last 512 calls that returned a value, in milliseconds; NaN before the first.
        latency_p50: their median.
        latency_p99: their 99th percentile.
        error: why it was lost last; empty if it never was.
    """

    name: str
    state: str
    pids: list[int]
    in_flight: int
    served: int
    errors: int
    rate: float
    sessions: int
    restarts: int
    latency_mean: float
    latency_p50: float
    latency_p99: float
    error: str


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The state of a service at one moment.

    Attributes:
        queued: number of calls that wait for a replica.
        restarts: number of replicas that were replaced.
        retried: number of times that a call was sent again because its replica was lost.
        quarantined: the calls that raised PoisonRequest, described with endpoint, request and caller.
    """

    name: str
    replicas: list[ReplicaStatus]
    queued: int
    restarts: int
    retried: int
    quarantined: list[str]


def keep_until_done(futures: set[F], future: F) -> F:
    """Keep a future or task in a set until it is done, as the event loop has only weak references; return it."""
    futures.add(future)
    future.add_done_callback(futures.discard)
    return future


def without_stop(method: Callable[..., Any], *args: object, **kwargs: object) -> Value:
    """Call a method, and raise RuntimeError instead of StopIteration, which a future cannot carry."""
    try:
        return method(*args, **kwargs)
    except StopIteration as error:
        raise RuntimeError("it raised StopIteration: the iterator is exhausted") from error
