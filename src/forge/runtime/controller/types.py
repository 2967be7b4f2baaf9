"""What passes between callers, services and replicas: a call, and a request on its way to replicas.

A dead process may have served many requests, and one of them may have killed it. All that it was working on are
suspects: they are sent again in groups of an eighth, so that the next death has fewer of them, and a request that is
the only suspect of its last death is not sent again.
"""

from __future__ import annotations

import contextvars
import itertools
import os
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
Value = Any  # what an endpoint returned: anything that pickle carries
Kwargs = dict[str, Any]  # the keyword arguments of a call
Pending = Coroutine[Any, Any, T]  # a call that waits to be awaited

_numbers = itertools.count()
_PACKAGE = os.path.dirname(__file__)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a service: an endpoint with its arguments, and how to send it."""

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
    """A call of an endpoint. It keeps its `id` however often it is sent; each attempt has a new `token`.

    Attributes (times on the monotonic clock, in seconds):
        created: when the call was made; its time limit counts from then.
        sent: when it was last sent.
        attempts: how often it was sent.
        deaths: replicas whose death this request may have caused.
        suspects: requests that may have caused the last of these deaths.
        avoid: indices of these replicas.
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
    suspects: int = 0
    avoid: set[int] = field(default_factory=set)

    @property
    def time_left(self) -> float:
        """Return seconds until its time limit."""
        return max(0.0, self.created + self.limit - time.monotonic())

    def send(self) -> None:
        """Count another attempt, under a new token."""
        self.token = next(_numbers)
        self.sent = time.monotonic()
        self.attempts += 1

    def record_death(self, suspects: set[Request]) -> None:
        """Record that its replica died, and which requests may be the cause."""
        if self in suspects:
            self.deaths += 1
            self.suspects = len(suspects)


def find_suspects(requests: set[Request]) -> set[Request]:
    """Return the requests that may have killed their replica: those that an earlier death accuses, if any."""
    return {request for request in requests if request.deaths} or {*requests}


def new_id(service: str) -> str:
    """Return an id for a request, unique within the run."""
    return f"{service}-{os.getpid()}-{next(_numbers)}"


def name_caller() -> str:
    """Return name the code outside this package that makes a call: `function (file:line)`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


_request: contextvars.ContextVar[str | None] = contextvars.ContextVar("forge_request", default=None)


@dataclass(frozen=True, slots=True)
class ActorContext:
    """The place of one process within a component: replica and rank.

    `incarnation` counts the processes in this place: 0 is the first, each respawn adds one. `rendezvous` is the path of
    a FileStore for torch.distributed; None for a replica of one process.
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
    """Return the id of the request that is being served; None outside of a request.

    A request keeps its id when it is sent again after a replica was lost: an endpoint that must not act twice stores
    the id together with its effect.
    """
    return _request.get()
