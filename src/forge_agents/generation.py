"""One answer of a session while it is sampled, and afterwards."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from forge.types import Completion

from .messages import Delta, ModelRequest, ModelTurn

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]


@dataclass(eq=False)
class Generation:
    """The answer to one request. `news` has its pieces, and None once its task has ended."""

    request: ModelRequest
    ids: tuple[str, ...]
    turns: list[ModelTurn] = field(default_factory=list)
    prompt_tokens: int = 0
    news: asyncio.Queue[Delta | None] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None

    def tell(self, sample: int, kind: str, text: str) -> None:
        """Pass on a piece of a sample's thought or content."""
        self.news.put_nowait(Delta(sample, thought=text) if kind == "thought" else Delta(sample, content=text))

    async def pieces(self, patience: float) -> AsyncIterator[Delta | None]:
        """The pieces of the answer; None after each `patience` seconds without one.

        Raises:
            what ended the generation.
        """
        assert self.task is not None
        while True:
            try:
                piece = await asyncio.wait_for(self.news.get(), patience)
            except TimeoutError:
                yield None
                continue
            if piece is None:
                break
            yield piece
        self.task.result()


def cut_turn(turn: Completion, count: int) -> None:
    """Keep the first tokens of a turn, which a stop string ends."""
    del turn.token_ids[count:], turn.logprobs[count:], turn.versions[count:], turn.top_logprobs[count:]
    turn.finish = "stop"


def make_token() -> str:
    """Return random letters for an id."""
    # Not of the seed: an id must not recur in another session.
    return f"{random.SystemRandom().getrandbits(96):024x}"
