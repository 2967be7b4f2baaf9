"""One call on its way: its arguments and caller, when it was sent, and which replicas died while serving it.

A dead process may have served many calls, and one of them may have killed it. Such a call must not take down one
replica after the other, and no innocent call may be blamed. The rule is two deaths, the second alone: all calls that a
dead replica was working on are suspects and are sent again one at a time; a call that is the only suspect of a second
death is the cause, and is not sent a third time.

One at a time would mean that each waits for the end of the one before it, which may take minutes. But a call that kills
does so at about the same age each time, the seconds since work on it began. So a suspect is accused only around the age
that it had at the last death, and others may start beside it while it is far from that age.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from .cast import Cast

T = TypeVar("T")
Value = Any  # what an endpoint returned: anything that pickle carries
Kwargs = dict[str, Any]  # the keyword arguments of a call
Pending = Coroutine[Any, Any, T]  # a call that waits to be awaited

_numbers = itertools.count()
_PACKAGE = os.path.dirname(__file__)

# Two deaths are attributed to one request if its age at the second differs from its age at the first by less than
# AGE_MARGIN seconds plus a quarter of that age: half a second for the noise of the scheduler and of noticing a death,
# and a share because a call on a busy machine is slower as a whole.
AGE_MARGIN = 0.5
AGE_SHARE = 0.25

# An example: replicas 0 and 1, requests A and B, and A kills its process 3 s after work on it began.
#
#     0.0  A begins at replica 0.
#     2.0  B begins at replica 0 as well.
#     3.0  Replica 0 dies. Suspects: A at the age of 3 s, B at the age of 1 s. Both have one death.
#     3.1  A is sent to replica 1. B is a suspect too and must wait, as A was sent less than ISOLATION = 1 s ago.
#     4.1  A is 1 s old, 2 s before its fatal age: a crash now would not be attributed to it (its tolerance is
#          0.5 + 0.25 * 3 = 1.25 s). B is sent to replica 1 too, and its own isolation begins.
#     6.1  Replica 1 dies. A is 3 s old, as at the first death: accused. B is 2 s old, 1 s off its fatal age and outside
#          its tolerance of 0.75 s: not accused. So A is the only suspect, and its second death ends it: PoisonRequest.
#     6.2  B, still with one death, is sent to the next replica, and is answered.


@dataclass(slots=True, eq=False)
class Request:
    """A call of an endpoint. It keeps its `id` however often it is sent; each attempt has a new `token`.

    Attributes (times on the monotonic clock, in seconds):
        created: when the call was made; its time limit counts from then.
        sent, began: when it was last sent, and when work on it began; None while it waits for the component's thread.
        attempts: how often it was sent.
        deaths: replicas whose death this request may have caused.
        suspect_count: requests that may have caused the last of these deaths.
        fatal_age: seconds of work on it when that replica died.
        last_death: when a replica last died while serving it.
        avoid: indices of these replicas.
        cast: the `Cast` of a fanout, which the first attempt shares with other requests.
    """

    id: str
    endpoint: str
    args: tuple
    kwargs: Kwargs
    caller: str
    limit: float
    session: str | None = None
    cast: Cast | None = None
    created: float = field(default_factory=time.monotonic)
    token: int = 0
    sent: float = 0.0
    began: float | None = None
    attempts: int = 0
    deaths: int = 0
    suspect_count: int = 0
    fatal_age: float = 0.0
    last_death: float = 0.0
    avoid: set[int] = field(default_factory=set)

    @property
    def time_left(self) -> float:
        """Seconds until its time limit."""
        return max(0.0, self.created + self.limit - time.monotonic())

    def send(self) -> None:
        """Count another attempt, under a new token."""
        self.token = next(_numbers)
        self.sent = time.monotonic()
        self.began = None
        self.attempts += 1

    def age(self, now: float) -> float:
        """Seconds of work on it at this replica."""
        return 0.0 if self.began is None else now - self.began

    def needs_isolation(self, now: float, isolation: float, patience: float) -> bool:
        """Whether no second suspect may be sent beside it, so that one more death can be attributed.

        True for a suspect that is not past its fatal age, and was sent less than `isolation` seconds ago or reaches
        that age within `patience`.
        """
        until_safe = self.fatal_age + self._tolerance - self.age(now)
        if self.deaths == 0 or until_safe <= 0:
            return False
        # From a little before the window in which it is accused, a neighbour that kills at once would be taken for it.
        window = min(patience, 2 * self._tolerance + AGE_MARGIN)
        in_danger = self.began is not None and until_safe < window
        return in_danger or now - self.sent < isolation

    def is_accused(self, now: float) -> bool:
        """Whether it is the probable cause if its replica dies now: a request that kills does so at about the same age
        each time."""
        return self.began is not None and self.deaths > 0 and abs(self.age(now) - self.fatal_age) < self._tolerance

    def record_death(self, now: float, suspect_count: int) -> None:
        """Record that its replica died, and that `suspect_count` requests may be the cause."""
        self.last_death = now
        # One that still waited for the component's thread cannot be the cause.
        if self.began is not None:
            self.deaths += self.deaths == 0 or self.is_accused(now)
            self.fatal_age = self.age(now)
            self.suspect_count = suspect_count

    @property
    def _tolerance(self) -> float:
        return AGE_MARGIN + AGE_SHARE * self.fatal_age


def new_id(service: str) -> str:
    """Return an id for a request, unique within the run."""
    return f"{service}-{os.getpid()}-{next(_numbers)}"


def caller() -> str:
    """Name the code outside this package that makes a call: `function (file:line)`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
