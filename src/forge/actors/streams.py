"""Streaming: requests whose tokens are read while they are generated."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future

from ..engines.interface import Engine, extend_completion, slice_completion
from ..observability import Reduce, record_metric
from ..types import Completion, Sampling

WAIT = 1.0  # seconds that a caller waits for new tokens
MOST = 4096  # log-probabilities that are sent at once: an answer holds up its caller while it is unpacked
FORGOTTEN = 60.0  # seconds without a request after which a stream is closed


class StreamLost(LookupError):
    """A stream that this generator does not know: the one that wrote it was lost, or it was not read for a minute."""


class Streams:
    """The streams of one engine. A stream that is not read for a minute is cancelled."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.open_ones: dict[int, _Stream] = {}

    def open(self, prompt_ids: Sequence[int], sampling: Sampling, priority: int, number: int | None = None) -> int:
        """Start a request; its number, by default a new one. ValueError: as of `Engine.submit`."""
        stream = _Stream(asyncio.get_running_loop())
        stream.future = self.engine.submit(prompt_ids, sampling, priority=priority, listener=stream.tell)
        stream.future.add_done_callback(stream.ended)
        # No other generator may know the number: a session whose generator was lost moves to another one.
        number = secrets.randbits(63) if number is None else number
        self.open_ones[number] = stream
        stream.loop.call_later(FORGOTTEN, self._look_at, number)
        return number

    async def next(self, number: int) -> list[tuple[int, Completion]]:
        """(sample, piece) of what came since the last time, the oldest first and not too much: of each sample at most
        one, whose `finish` says that it was the last. Waits a second for something to come.

        StreamLost: there is no such stream here. What the engine raised.
        """
        if number not in self.open_ones:
            raise StreamLost(f"stream {number} is not known here: the generator that wrote it was lost; ask again")
        return await self.open_ones[number].next()

    def close(self, number: int) -> None:
        """End a stream, whether it has ended or not."""
        if stream := self.open_ones.pop(number, None):
            stream.future.cancel()

    def _look_at(self, number: int) -> None:
        if stream := self.open_ones.get(number):
            remaining = stream.last_read + FORGOTTEN - time.monotonic()
            if remaining > 0:
                stream.loop.call_later(remaining, self._look_at, number)
            else:
                self.close(number)


class _Stream:
    """The tokens of one request that were not read yet. Only its `loop` touches it."""

    future: Future[list[Completion]]

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.last_read = time.monotonic()
        self.pieces: dict[int, Completion] = {}  # by sample
        self.something = asyncio.Event()
        self.done = False

    def tell(self, sample: int, piece: Completion) -> None:
        """Take new tokens from the engine, in its thread."""
        self.loop.call_soon_threadsafe(self._take_piece, sample, piece)

    def ended(self, _: Future[list[Completion]]) -> None:
        """Note that the request has ended, in the thread that completed it."""
        if not self.loop.is_closed():  # as it may be when the engine is closed last
            self.loop.call_soon_threadsafe(self._end_stream)

    async def next(self) -> list[tuple[int, Completion]]:
        self.last_read = time.monotonic()
        try:
            async with asyncio.timeout(WAIT):
                await self.something.wait()
        except TimeoutError:
            return []
        pieces = self._take_some()
        if not self.done and not self.pieces:
            self.something.clear()
        elif not pieces:
            self.future.result()  # raises what went wrong
        record_metric("generator/tokens", sum(len(piece.token_ids) for piece in pieces.values()), Reduce.SUM)
        return list(pieces.items())

    def _take_some(self) -> dict[int, Completion]:
        """Return the tokens that one call returns."""
        pieces: dict[int, Completion] = {}
        room = MOST
        while self.pieces and room > 0:
            sample = next(iter(self.pieces))
            piece = self.pieces.pop(sample)
            size = len(piece.token_ids)
            width = 1 + max(map(len, piece.top_logprobs), default=0)
            count = min(size, max(1, room // width))
            room -= max(1, count) * width
            pieces[sample] = slice_completion(piece, 0, count)
            if count < size:
                self.pieces[sample] = slice_completion(piece, count, size)
                break
        return pieces

    def _take_piece(self, sample: int, piece: Completion) -> None:
        if sample in self.pieces:
            extend_completion(self.pieces[sample], piece)
        else:
            self.pieces[sample] = piece
        self.something.set()

    def _end_stream(self) -> None:
        self.done = True
        self.something.set()
