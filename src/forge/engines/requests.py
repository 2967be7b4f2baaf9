"""What the engine works on: requests, and their samples while they hold a row or wait to get one back."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from forge.engines.interface import Listener
from forge.types import Completion, Sampling

Prefix = tuple[Tensor, Tensor]  # keys and values, (layers, K, tokens, D) each


@dataclass(slots=True, eq=False)
class Request:
    """A prompt with n samples to draw, each at most `limit` tokens long."""

    prompt: tuple[int, ...]
    sampling: Sampling
    limit: int
    seed: int
    stops: frozenset[int]
    priority: int = 0
    listener: Listener | None = None
    future: Future[list[Completion]] = field(default_factory=Future)
    admitted: int = 0
    done: dict[int, Completion] = field(default_factory=dict)  # by sample
    prefix: Prefix | None = None  # of the prompt, while samples wait for a row

    @property
    def tokens(self) -> list[int]:
        """What a sample starts from."""
        return list(self.prompt)

    def tell(self, sample: int, piece: Completion) -> None:
        """Hand a piece to the listener; if that raises, the request has failed."""
        if self.listener is None or self.future.done():
            return
        try:
            self.listener(sample, piece)
        except Exception as error:
            if self.future.set_running_or_notify_cancel():
                self.future.set_exception(error)


@dataclass(slots=True, eq=False)
class Row:
    """A sample that runs, or that was cut and waits to go on.

    `drawn` is what it had when it last got its row: the i-th token since then is drawn in step `start + i` and
    recorded at position `context + i`.
    """

    request: Request
    sample: int
    start: int
    drawn: Completion
    prefix: Prefix | None = None  # of the prompt and what is drawn, between being computed and being placed
    top: list[dict[int, float]] = field(default_factory=list)  # beside every token so far, where they are asked for

    @property
    def tokens(self) -> list[int]:
        """What it goes on from."""
        return [*self.request.prompt, *self.drawn.token_ids]

    @property
    def context(self) -> int:
        """Tokens before the last one of those."""
        return len(self.request.prompt) + len(self.drawn.token_ids) - 1
