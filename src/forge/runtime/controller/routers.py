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
        """Return the index of the replica in its service, from 0."""

    @property
    def in_flight(self) -> int:
        """Return the number of requests that were sent and not answered yet."""

    @property
    def served(self) -> int:
        """Return the number of requests that were answered."""


C = TypeVar("C", bound=Candidate)
Router = Callable[[Sequence[Any], Request], Any]


def least_loaded(candidates: Sequence[C], request: Request) -> C:
    """Return the replica with the fewest calls in flight; among equals, the replica that has served the fewest."""
    return min(candidates, key=lambda replica: (replica.in_flight, replica.served))


class RoundRobin:
    """Router that chooses replicas in turn by index, regardless of load."""

    def __init__(self) -> None:
        self._last = -1

    def __call__(self, candidates: Sequence[C], request: Request) -> C:
        # The next higher index, or the lowest one after the last.
        replica = min(candidates, key=lambda replica: (replica.index <= self._last, replica.index))
        self._last = replica.index
        return replica


class PrefixAffine:
    """Router that sends prompts with the same prefix to the same replica, which has the prefix cached.

    The prompt is the call's first argument. If that replica has over `slack` calls more in flight than the least loaded
    one, the call goes to the least loaded one. Rendezvous hashing (Thaler and Ravishankar, 1998) chooses the replica:
    when a replica comes or goes, only the prefixes that it serves move.

    Args:
        length: characters or tokens of the prompt that count as its prefix.
        slack: calls in flight that a cached prefix outweighs.
    """

    def __init__(self, length: int = 256, slack: int = 16) -> None:
        self.length, self.slack = length, slack

    def __call__(self, candidates: Sequence[C], request: Request) -> C:
        prompt = next(iter((*request.args, *request.kwargs.values())), None)
        tokens = getattr(prompt, "token_ids", prompt)
        prefix = repr(tokens[: self.length] if isinstance(tokens, Sequence) else tokens)
        prefix_replica = max(
            candidates,
            key=lambda replica: hashlib.blake2b(f"{replica.index}:{prefix}".encode(), digest_size=8).digest(),
        )
        fallback = least_loaded(candidates, request)
        return fallback if prefix_replica.in_flight > fallback.in_flight + self.slack else prefix_replica


ROUTERS: dict[str, Callable[[], Router]] = {
    "least_loaded": lambda: least_loaded,
    "round_robin": RoundRobin,
    "prefix_affine": PrefixAffine,
}


def resolve_router(router: str | Router) -> Router:
    """Return the router that a setting names, by a key of ROUTERS or as `package.module:function`.

    A function is returned as it is.

    Raises:
        ValueError: no router has this name, or it is not callable.
    """
    if isinstance(router, str) and ":" in router:
        router = resolve(router, "router")
    if isinstance(router, str):
        if router not in ROUTERS:
            raise ValueError(
                f"router must be {', '.join(ROUTERS)}, package.module:function or a function, got {router!r}"
            )
        return ROUTERS[router]()
    if not callable(router):
        raise ValueError(f"router {router!r} is not callable")
    return router
