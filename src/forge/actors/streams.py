"""Streams: requests whose tokens are read while they are generated."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future

from ..engines.interface import Engine, extend_completion, slice_completion
from ..observability import Reduce, record_metric
from ..types import Completion, Sampling

WAIT = 1.0  # seconds that `next` waits for new tokens
MAX_LOGPROBS = (
    4096  # about as many log-probabilities one call returns: a caller can do nothing else while it unpickles them
)
FORGOTTEN = 60.0  # seconds after which a stream without a reader is closed


class StreamLost(LookupError):
    """Error: a stream is unknown to this generator, because the stream's generator died or the stream was not read for
    a minute."""


class Streams:
    """Token streams of one engine by number; a stream that is not read for a minute is closed."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.open_ones: dict[int, _Stream] = {}

    def open(self, prompt_ids: Sequence[int], sampling: Sampling, priority: int, number: int | None = None) -> int:
        """Start a request and return the number of its stream.

        Args:
            number: the number to use, a random one; None draws one.

        Raises:
            ValueError: see `Engine.submit`.
        """
        stream = _Stream(asyncio.get_running_loop())
        stream.future = self.engine.submit(prompt_ids, sampling, priority=priority, listener=stream.tell)
        stream.future.add_done_callback(stream.ended)

        # Random, and not counted: a session moves to another generator if its own is lost, and must not find another
        # stream of this number there.
        number = secrets.randbits(63) if number is None else number
        self.open_ones[number] = stream
        stream.loop.call_later(FORGOTTEN, self._close_if_unread, number)
        return number

    async def next(self, number: int) -> list[tuple[int, Completion]]:
        """Return new tokens of a stream as (sample, piece) pairs, at most one piece of each sample.

        It waits a second for tokens, and returns pieces with about MAX_LOGPROBS log-probabilities, oldest first. The
        last piece of a sample has a `finish`.

        Raises:
            StreamLost: there is no such stream here.
            Exception: what the engine raised for this request.
        """
        if number not in self.open_ones:
            raise StreamLost(
                f"stream {number} is unknown to this generator, because the replica that wrote it died: send the "
                "request again"
            )
        return await self.open_ones[number].next()

    def close(self, number: int) -> None:
        """Forget a stream, and cancel its request if it is still running."""
        if stream := self.open_ones.pop(number, None):
            stream.future.cancel()

    # Close a stream that was not read for FORGOTTEN seconds; look again later at one that was.
    def _close_if_unread(self, number: int) -> None:
        if stream := self.open_ones.get(number):
            remaining = stream.last_read + FORGOTTEN - time.monotonic()
            if remaining > 0:
                stream.loop.call_later(remaining, self._close_if_unread, number)
            else:
                self.close(number)


class _Stream:
    """The tokens of one request that were not read yet. The engine's threads pass them on to the event loop `loop`."""

    future: Future[list[Completion]]

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.last_read = time.monotonic()
        self.pieces: dict[int, Completion] = {}  # unread tokens by sample
        self.is_readable = asyncio.Event()  # there are unread tokens, or the request has ended
        self.done = False

    def tell(self, sample: int, piece: Completion) -> None:
        """Add new tokens of a sample; called by the engine in the engine's thread."""
        self.loop.call_soon_threadsafe(self._take_piece, sample, piece)

    def ended(self, _: Future[list[Completion]]) -> None:
        """Record that the request has ended; called in the thread that completed the request."""
        if not self.loop.is_closed():  # the engine may be closed after the loop
            self.loop.call_soon_threadsafe(self._end_stream)

    async def next(self) -> list[tuple[int, Completion]]:
        # Return new tokens by sample, as soon as there are some; none after WAIT seconds.
        self.last_read = time.monotonic()
        try:
            async with asyncio.timeout(WAIT):
                await self.is_readable.wait()
        except TimeoutError:
            return []

        pieces = self._take_some()
        if not self.done and not self.pieces:
            self.is_readable.clear()
        # A request that failed raises its error once all of its tokens were read.
        elif not pieces:
            self.future.result()
        record_metric("generator/tokens", sum(len(piece.token_ids) for piece in pieces.values()), Reduce.SUM)
        return list(pieces.items())

    def _take_some(self) -> dict[int, Completion]:
        """Remove and return unread tokens by sample, the oldest first, up to about MAX_LOGPROBS log-probabilities."""
        pieces: dict[int, Completion] = {}
        budget = MAX_LOGPROBS
        while self.pieces and budget > 0:
            sample = next(iter(self.pieces))  # the one that waits longest
            piece = self.pieces.pop(sample)
            size = len(piece.token_ids)
            logprobs_per_token = 1 + max(map(len, piece.top_logprobs), default=0)

            # At least one token, so that every call makes progress; a piece may be empty and only say the finish.
            count = min(size, max(1, budget // logprobs_per_token))
            budget -= max(1, count) * logprobs_per_token
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
        self.is_readable.set()

    def _end_stream(self) -> None:
        self.done = True
        self.is_readable.set()
