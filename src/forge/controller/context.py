"""What an actor knows about its own place: which component, replica and rank it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ActorContext:
    """The place of one process within a component.

    `rendezvous` is the `host:port` of a TCPStore that rank 0 holds open for torch.distributed; None for a replica of
    one process.
    """

    component: str
    replica: int = 0
    rank: int = 0
    world_size: int = 1
    rendezvous: str | None = None

    def __str__(self) -> str:
        rank = f" rank {self.rank}" if self.world_size > 1 else ""
        return f"{self.component}[{self.replica}]{rank}"
