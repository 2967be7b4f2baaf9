"""One call on its way: its arguments and caller, when it was sent, and which replicas died while serving it."""

from __future__ import annotations

import itertools
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

_numbers = itertools.count()
# Two deaths are attributed to one request if its age at the second is within MARGIN seconds, and a quarter of that age,
# of its age at the first.
MARGIN = 0.5
_PACKAGE = os.path.dirname(__file__)


@dataclass(slots=True, eq=False)
class Request:
    """A call of an endpoint. It keeps its `id` however often it is sent; each sending has a `token` of its own.

    Attributes (times on the monotonic clock, in seconds):
        sent, began: when it was last sent, and when work on it began there; None while it waits for the component's
            thread.
        attempts: how often it was sent.
        deaths: replicas whose death this request may have caused.
        crowd: requests that may have caused the last of these deaths.
        fatal_age: seconds of work on it when that replica died.
        lost: when a replica last died while serving it.
        avoid: indices of these replicas.
        cast: the `Cast` of a fanout, which the first sending shares with others.
    """

    id: str
    endpoint: str
    args: tuple
    kwargs: dict[str, Any]
    caller: str
    limit: float
    session: str | None = None
    cast: Any = None
    made: float = field(default_factory=time.monotonic)
    token: int = 0
    sent: float = 0.0
    began: float | None = None
    attempts: int = 0
    deaths: int = 0
    crowd: int = 0
    fatal_age: float = 0.0
    lost: float = 0.0
    avoid: set[int] = field(default_factory=set)

    @property
    def left(self) -> float:
        """Seconds until its time limit."""
        return max(0.0, self.made + self.limit - time.monotonic())

    def send(self) -> None:
        """Count another attempt, under a new token."""
        self.token, self.sent, self.began = next(_numbers), time.monotonic(), None
        self.attempts += 1

    def age(self, now: float) -> float:
        """Seconds of work on it at this replica."""
        return 0.0 if self.began is None else now - self.began

    def isolated(self, now: float, within: float, patience: float) -> bool:
        """Whether no second suspect may be sent beside it, so that one more death can be attributed.

        It saw a death, and was sent at most `within` seconds ago without yet being older than it was then; or it will
        reach that age within `patience`, where a neighbour's crash would be attributed to it by mistake.
        """
        past = self.fatal_age + self._tolerance - self.age(now)
        if self.deaths == 0 or past <= 0:
            return False
        near = self.began is not None and past < min(patience, 2 * self._tolerance + MARGIN)
        return near or now - self.sent < within

    def accused(self, now: float) -> bool:
        """Whether it is the likely cause if its replica dies now: a request that kills does so at about the same age
        each time."""
        began = self.began is not None
        return began and self.deaths > 0 and abs(self.age(now) - self.fatal_age) < self._tolerance

    def saw_death(self, now: float, crowd: int) -> None:
        """Its replica died; `crowd` requests may be the cause."""
        self.lost = now
        if self.began is not None:
            self.deaths += self.deaths == 0 or self.accused(now)
            self.fatal_age, self.crowd = self.age(now), crowd

    @property
    def _tolerance(self) -> float:
        return MARGIN + 0.25 * self.fatal_age


def new_id(service: str) -> str:
    """An id for a request, unique within the run."""
    return f"{service}-{os.getpid()}-{next(_numbers)}"


def caller() -> str:
    """The code outside this package that is making a call: `function (file:line)`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
