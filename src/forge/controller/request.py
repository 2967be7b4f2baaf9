"""One call on its way: what was asked, by whom, since when, and what has become of it so far."""

from __future__ import annotations

import itertools
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

_numbers = itertools.count()
# How much older than at the last death, in seconds, a request must become to be out of suspicion.
MARGIN = 0.5
_PACKAGE = os.path.dirname(__file__)


@dataclass(slots=True, eq=False)
class Request:
    """A call of an endpoint. It keeps its `id` however often it is sent.

    `attempts` counts how often it was sent, `deaths` the replicas whose death may be its doing, `crowd` the requests
    that the last of them may be put down to, `avoid` the places where it was lost. Times are of the monotonic clock,
    in seconds.
    """

    id: str
    endpoint: str
    args: tuple
    kwargs: dict[str, Any]
    caller: str
    limit: float
    session: str | None = None
    made: float = field(default_factory=time.monotonic)
    sent: float = 0.0
    attempts: int = 0
    deaths: int = 0
    crowd: int = 0
    fatal_age: float = 0.0
    avoid: set[int] = field(default_factory=set)

    @property
    def left(self) -> float:
        """Seconds until its time limit."""
        return max(0.0, self.made + self.limit - time.monotonic())

    def suspected(self, now: float) -> bool:
        """Whether, if its replica died now, it would be the likely cause: it saw a replica die before, and is not yet
        clearly older than it was then. A request that kills does so at about the same age again."""
        return self.deaths > 0 and now - self.sent < self.fatal_age + MARGIN

    def saw_death(self, now: float, crowd: int) -> None:
        """Its replica died at this time, and so many requests come into question."""
        self.deaths += self.deaths == 0 or self.suspected(now)
        self.fatal_age, self.crowd = now - self.sent, crowd


def new_id(service: str) -> str:
    """An id for a request, unique within the run."""
    return f"{service}-{os.getpid()}-{next(_numbers)}"


def caller() -> str:
    """The code outside this package that is making a call: `function (file:line)`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
