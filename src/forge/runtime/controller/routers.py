"""Routers: functions that choose a replica for a call from the candidates and the request.

A router gets the replicas that serve and have room, at least one, and returns one of them. Each candidate has an
`index`, `in_flight` calls and `served` calls; a request has `endpoint`, `args`, `kwargs` and `session`. Calls of a
session are sent to the session's replica without asking the router, as long as that replica lives.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from ...config.plugin import resolve
from .types import Request


class Candidate(Protocol):
    """The attributes of a replica that a router may use."""

    @property
    def index(self) -> int:
        """Return number of the replica in its service."""

    @property
    def in_flight(self) -> int:
        """Return requests that were sent and not answered."""

    @property
    def served(self) -> int:
        """Return requests that were answered."""


C = TypeVar("C", bound=Candidate)
Router = Callable[[Sequence[Any], Request], Any]


def least_loaded(candidates: Sequence[C], request: Request) -> C:
    """Choose the replica with the fewest calls in flight; among equals, the one that served the fewest."""
    return min(candidates, key=lambda c: (c.in_flight, c.served))


class RoundRobin:
    """Choose one replica after the other, whatever their load."""

    def __init__(self) -> None:
        self._last = -1

    def __call__(self, candidates: Sequence[C], request: Request) -> C:
        replica = min(candidates, key=lambda c: (c.index <= self._last, c.index))
        self._last = replica.index
        return replica


class PrefixAffine:
    """Send the same beginning of the first argument to the same replica, whose cache holds it; or to the least loaded
    one, if that replica has `slack` more calls in flight.

    Rendezvous hashing (Thaler and Ravishankar, 1998): when replicas come and go, only the prefixes of those move.

    Args:
        length: characters or tokens that count as the prefix.
        slack: calls in flight that a cached prefix is worth.
    """

    def __init__(self, length: int = 256, slack: int = 16) -> None:
        self.length, self.slack = length, slack

    def __call__(self, candidates: Sequence[C], request: Request) -> C:
        prompt = next(iter((*request.args, *request.kwargs.values())), None)
        tokens = getattr(prompt, "token_ids", prompt)
        prefix = repr(tokens[: self.length] if isinstance(tokens, Sequence) else tokens)
        home = max(candidates, key=lambda c: _prefix_weight(prefix, c.index))
        fallback = least_loaded(candidates, request)
        return fallback if home.in_flight > fallback.in_flight + self.slack else home


def _prefix_weight(prefix: str, index: int) -> bytes:
    return hashlib.blake2b(f"{index}:{prefix}".encode(), digest_size=8).digest()


ROUTERS: dict[str, Callable[[], Router]] = {
    "least_loaded": lambda: least_loaded,
    "round_robin": RoundRobin,
    "prefix_affine": PrefixAffine,
}


def resolve_router(router: str | Router) -> Router:
    """Return the router of this name, or at `package.module:function`; a function is returned as it is.

    Raises:
        ValueError: no router has this name, or it is not callable.
    """
    if isinstance(router, str) and ":" in router:
        router = resolve(router, "router")
    if isinstance(router, str):
        if router not in ROUTERS:
            raise ValueError(f"router must be {', '.join(ROUTERS)}, package.module:function or a function: {router!r}")
        return ROUTERS[router]()
    if not callable(router):
        raise ValueError(f"router {router!r} is not callable")
    return router
