"""The context of code in a component: its replica and rank, and the request that it is serving."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass

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
