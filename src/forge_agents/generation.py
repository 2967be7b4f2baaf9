"""The answer to one request while it is generated."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from .messages import Delta, ModelRequest, ModelTurn


@dataclass(eq=False)
class Generation:
    """The answer to one request while it is generated.

    ids: the ids of its samples.
    turns: the complete samples, once they are all sampled.
    news: pieces of the samples for the connection that sends them; None once the task has ended.
    task: generates the answer.
    """

    request: ModelRequest
    ids: tuple[str, ...]
    turns: list[ModelTurn] = field(default_factory=list)
    prompt_tokens: int = 0
    news: asyncio.Queue[Delta | None] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None

    def put_text(self, sample: int, kind: str, text: str) -> None:
        """Queue a piece of a sample's text, whose kind is "thought" or "content"."""
        self.news.put_nowait(Delta(sample, thought=text) if kind == "thought" else Delta(sample, content=text))

    async def pieces(self, interval: float) -> AsyncIterator[Delta | None]:
        """Yield the pieces of the answer as they arrive, and None after each `interval` seconds without one.

        Raises:
            Exception: the one with which the generation failed, after all of its pieces.
        """
        assert self.task is not None
        while True:
            try:
                piece = await asyncio.wait_for(self.news.get(), interval)
            except TimeoutError:
                yield None
                continue
            if piece is None:
                break
            yield piece
        self.task.result()
