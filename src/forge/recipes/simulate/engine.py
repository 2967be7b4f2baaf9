"""A simulated engine: continuous batching with slots, whose rows all advance by one token in a decode step."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .settings import Generators


class EngineLost(RuntimeError):
    """The engine's machine failed; what it was generating is lost."""


@dataclass(eq=False, slots=True)
class Generation:
    """A request of one group, with the lengths that its completions will have.

    Attributes:
        admitted, complete: samples that got a row, and that have ended.
        versions: of the weights that drew each sample's first token.
    """

    lengths: Sequence[int]
    prompt: int
    future: asyncio.Future[list[int]]
    admitted: int = 0
    complete: int = 0
    versions: list[int] = field(default_factory=list)


class Row(NamedTuple):
    """A running sample: the position at which it ends, and that at which it began. Numbers differ, so that a heap of
    rows compares no further."""

    end: int
    number: int
    start: float
    generation: Generation


class SimulatedEngine:
    """One engine. `position` counts decode steps, as a real number within one; it stands still without rows.

    Attributes:
        busy, row_seconds: seconds in which it had rows, and their sum over rows.
        tokens, lost: tokens drawn, and those among them whose machine failed before their group was complete.
    """

    def __init__(self, settings: Generators, version: int) -> None:
        self.settings = settings
        self.version = version
        self.loop = asyncio.get_running_loop()
        self.rows: list[Row] = []
        self.waiting: deque[Generation] = deque()
        self.update: tuple[int, asyncio.Future[None]] | None = None
        self.position = 0.0
        self.stall = 0.0  # seconds of prompts to compute before the next decode step
        self.since = self.loop.time()
        self.busy = 0.0
        self.row_seconds = 0.0
        self.tokens = 0.0
        self.lost = 0.0
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    async def generate(self, lengths: Sequence[int], prompt: int) -> list[int]:
        """Generate samples of these lengths; returns the version that began each.

        Raises:
            EngineLost: its machine failed.
        """
        generation = Generation(lengths, prompt, self.loop.create_future())
        self.waiting.append(generation)
        self.advance()
        self._settle()
        return await generation.future

    async def update_weights(self, version: int) -> None:
        """Read new weights while decoding continues, and swap them in as `on_update` says.

        Raises:
            EngineLost: its machine failed.
        """
        # Weights are read into separate memory, so that decoding does not wait for the copy.
        await asyncio.sleep(self.settings.load_seconds)
        swapped: asyncio.Future[None] = self.loop.create_future()
        self.update = (version, swapped)
        self.advance()
        self._settle()
        await swapped

    def fail(self) -> None:
        """Lose all that it does."""
        self.advance()
        self.lost += sum(self.position - row.start for row in self.rows)
        generations = {*self.waiting, *(row.generation for row in self.rows)}
        for generation in generations:
            # Samples that had ended are lost with the others of their group.
            self.lost += sum(generation.lengths[: generation.complete])
            if not generation.future.done():
                generation.future.set_exception(EngineLost())
        self.rows = []
        self.waiting.clear()
        if self.update is not None and not self.update[1].done():
            self.update[1].set_exception(EngineLost())
        self.update = None
        if self._timer is not None:
            self._timer.cancel()

    @property
    def decode_seconds(self) -> float:
        """Seconds of a decode step with the present rows."""
        return self.settings.step_seconds + self.settings.row_seconds * len(self.rows)

    def advance(self) -> None:
        """Bring position and counters to the present moment."""
        now = self.loop.time()
        elapsed = now - self.since
        self.since = now
        if not self.rows or elapsed <= 0:
            return
        # Prompts are computed first: rows stand still while they are.
        stalled = min(self.stall, elapsed)
        self.stall -= stalled
        self.busy += elapsed
        self.row_seconds += elapsed * len(self.rows)
        if elapsed > stalled:
            self._move(min(self.position + (elapsed - stalled) / self.decode_seconds, self.rows[0].end))

    def _move(self, position: float) -> None:
        """Draw the tokens up to a position, at most that of the first end."""
        self.tokens += (position - self.position) * len(self.rows)
        self.position = position

    def _settle(self) -> None:
        """End the rows that are complete, swap weights, admit what waits, and set the timer of the next end."""
        while self.rows and self.rows[0].end - self.position < 1e-6:
            self._complete(heapq.heappop(self.rows))
        if self.update is not None and not (self.settings.on_update == "finish" and self.rows):
            self._swap()
        # New groups wait for an update that waits for the running ones, or it would never have its turn.
        if self.update is None:
            self._admit()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.rows:
            seconds = self.stall + (self.rows[0].end - self.position) * self.decode_seconds
            self._timer = self.loop.call_later(seconds, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.advance()
        # The timer was set for this end after the last change, so that only rounding is between the two.
        self.stall = 0.0
        self._move(self.rows[0].end)
        self._settle()

    def _complete(self, row: Row) -> None:
        generation = row.generation
        generation.complete += 1
        if generation.complete == len(generation.lengths) and not generation.future.done():
            generation.future.set_result(generation.versions)

    def _swap(self) -> None:
        assert self.update is not None
        version, swapped = self.update
        self.update = None
        self.version = version
        if self.settings.on_update == "recompute":
            contexts = (self.position - row.start + row.generation.prompt for row in self.rows)
            self.stall += self.settings.token_seconds * sum(contexts)
        if not swapped.done():
            swapped.set_result(None)

    def _admit(self) -> None:
        """Give free rows to those that wait, in order; a group may begin with a part of its samples."""
        while self.waiting and len(self.rows) < self.settings.slots:
            generation = self.waiting[0]
            if not generation.admitted:
                self.stall += self.settings.token_seconds * generation.prompt
            room = self.settings.slots - len(self.rows)
            for length in generation.lengths[generation.admitted :][:room]:
                # Rows join between two steps, and end with one.
                grain = self.settings.grain
                end = math.ceil((math.ceil(self.position - 1e-6) + length) / grain) * grain
                heapq.heappush(self.rows, Row(end, next(self._numbers), self.position, generation))
                generation.versions.append(self.version)
                generation.admitted += 1
            if generation.admitted == len(generation.lengths):
                self.waiting.popleft()
