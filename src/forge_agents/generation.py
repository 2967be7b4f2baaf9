"""One answer of a session while it is sampled, and afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from .messages import Delta, ModelRequest, ModelTurn
from .tree import TokenRun


@dataclass(eq=False)
class Generation:
    """The answer to one request, while it is sampled and afterwards. Several connections may read it: a client that
    lost its own asks again."""

    request: ModelRequest
    ids: tuple[str, ...]
    deltas: list[Delta] = field(default_factory=list)
    turns: list[ModelTurn] = field(default_factory=list)
    runs: list[TokenRun] = field(default_factory=list)
    readers: int = 0
    is_delivered: bool = False
    began_at: float = field(default_factory=time.monotonic)
    prompt_tokens: int = 0
    task: asyncio.Task[None] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    alone: asyncio.Event = field(default_factory=asyncio.Event)  # whether no connection reads it

    def tell(self, *deltas: Delta) -> None:
        """Append pieces of the answer, and wake its readers."""
        self.deltas += deltas
        self.changed.set()
        self.changed = asyncio.Event()

    async def pieces(self, patience: float) -> AsyncIterator[Delta | None]:
        """The pieces from the first on; None after each `patience` seconds without one.

        Raises:
            what ended the generation.
        """
        assert self.task is not None
        sent = 0
        while True:
            changed = self.changed
            while sent < len(self.deltas):
                yield self.deltas[sent]
                sent += 1
            if self.task.done():
                self.task.result()
                return
            waiting = asyncio.ensure_future(changed.wait())
            try:
                first = asyncio.FIRST_COMPLETED
                done, _ = await asyncio.wait({self.task, waiting}, timeout=patience, return_when=first)
            finally:  # a reader that has gone is cancelled here, and its task would wait for ever
                waiting.cancel()
            if not done:
                yield None
