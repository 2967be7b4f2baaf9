"""One answer of a session while it is sampled, and afterwards."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from forge.types import Completion

from .messages import Delta, ModelRequest, ModelTurn
from .tree import TokenRun

CLOSING = 0.2  # seconds in which a closed connection is seen
ABANDONED = 10.0  # seconds in which a client may come back to its answer, of a server
WINDOW = 600.0  # seconds in which a retry gets an answer that was not received: a client's longest timeout
InThread = Callable[[Callable[[], Any]], Awaitable[Any]]


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


def abandon(generation: Generation) -> None:
    """Cancel a generation that no connection has come back to."""
    if not generation.readers and generation.task is not None:
        generation.task.cancel()


def make_delta(sample: int, kind: str, text: str) -> Delta:
    """Return a piece of a sample's thought or content."""
    return Delta(sample, thought=text) if kind == "thought" else Delta(sample, content=text)


def cut_turn(turn: Completion, count: int) -> None:
    """Keep the first tokens of a turn, which a stop string ends."""
    del turn.token_ids[count:], turn.logprobs[count:], turn.versions[count:], turn.top_logprobs[count:]
    turn.finish = "stop"


def make_token() -> str:
    """Return random letters for an id."""
    # Not of the seed: an id must not recur in a session that was restored.
    return f"{random.SystemRandom().getrandbits(96):024x}"
