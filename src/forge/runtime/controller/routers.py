"""How a replica is chosen for a call: functions of the candidates and the request.

A router gets the replicas that are up and have room, never none, and returns one of them. Each candidate has an
`index`, `in_flight` calls and `served` calls; a request has `endpoint`, `args`, `kwargs` and `session`. Calls of a
session go to the session's replica without asking the router, as long as that replica lives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from ...config.plugin import resolve
from .request import Request


class Candidate(Protocol):
    """What a router sees of a replica."""

    @property
    def index(self) -> int:
        """Number of the replica in its service."""

    @property
    def in_flight(self) -> int:
        """Requests that were sent and not answered."""

    @property
    def served(self) -> int:
        """Requests that were answered."""


C = TypeVar("C", bound=Candidate)
Router = Callable[[Sequence[Any], Request], Any]


def least_loaded(candidates: Sequence[C], request: Request) -> C:
    """The one with the fewest calls in flight; among equals, the one that served least."""
    return min(candidates, key=lambda c: (c.in_flight, c.served))


class RoundRobin:
    """One after the other, whatever their load."""

    def __init__(self) -> None:
        self._last = -1

    def __call__(self, candidates: Sequence[C], request: Request) -> C:
        chosen = min(candidates, key=lambda c: (c.index <= self._last, c.index))
        self._last = chosen.index
        return chosen


class PrefixAffine:
    """The same beginning of the first argument to the same replica, where its cache is; the least loaded one instead
    if that replica has `slack` more calls in flight than another.

    Rendezvous hashing (Thaler and Ravishankar, 1998): when replicas come and go, only the prefixes of those move.

    Args:
        length: characters or tokens that count as the prefix.
        slack: calls in flight that affinity is worth.
    """

    def __init__(self, length: int = 256, slack: int = 16) -> None:
        self.length, self.slack = length, slack

    def __call__(self, candidates: Sequence[C], request: Request) -> C:
        first = next(iter((*request.args, *request.kwargs.values())), None)
        tokens = getattr(first, "token_ids", first)
        prefix = repr(tokens[: self.length] if isinstance(tokens, Sequence) else tokens)
        chosen = max(candidates, key=lambda c: _weight(prefix, c.index))
        fallback = least_loaded(candidates, request)
        return fallback if chosen.in_flight > fallback.in_flight + self.slack else chosen


def _weight(prefix: str, index: int) -> bytes:
    return hashlib.blake2b(f"{index}:{prefix}".encode(), digest_size=8).digest()


NAMED: dict[str, Callable[[], Router]] = {
    "least_loaded": lambda: least_loaded,
    "round_robin": RoundRobin,
    "prefix_affine": PrefixAffine,
}


def resolve_router(router: str | Router) -> Router:
    """A router from its name, from `package.module:function`, or as it is.

    Raises:
        ValueError: there is none of this name, or it is not callable.
    """
    if isinstance(router, str) and ":" in router:
        router = resolve(router, "router")
    if isinstance(router, str):
        if router not in NAMED:
            raise ValueError(f"router must be {', '.join(NAMED)}, package.module:function or a function: {router!r}")
        return NAMED[router]()
    if not callable(router):
        raise ValueError(f"router {router!r} is not callable")
    return router
