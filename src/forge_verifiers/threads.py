"""Blocking functions in threads, with time limits, for callers in an event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Generic, TypeVar

from forge.rewards.verifier import Unscored

A = TypeVar("A")
B = TypeVar("B")


async def await_within(
    limit: float, call: Awaitable[A], name: str, progress: Callable[[], float | None] = lambda: None
) -> A:
    """Return the result of an awaitable, which is cancelled after `limit` seconds without progress.

    Args:
        limit: seconds.
        call: what is awaited.
        name: the call in errors.
        progress: returns a number that changes when there is progress; None: there is no such number, and `limit` holds
            for the whole call.

    Raises:
        Unscored: there was no progress for `limit` seconds, or the call was cancelled.
        RuntimeError: the call raised SystemExit.
    """

    async def without_exit() -> A:
        try:
            return await call
        except SystemExit as error:  # would end the event loop
            raise RuntimeError(repr(error)) from None

    task = asyncio.create_task(without_exit())
    try:
        last_progress = progress()
        while not (await asyncio.wait((task,), timeout=limit))[0]:
            new_progress = progress()
            if new_progress == last_progress:
                problem = "took more than" if new_progress is None else "made no progress for"
                raise Unscored(f"{name} {problem} {limit:g} s")
            last_progress = new_progress
        if task.cancelled():
            raise Unscored(f"{name} was cancelled")
        return task.result()
    finally:
        task.cancel()


class Turns:
    """Limiter that runs blocking functions in threads, at most `limit` at a time in an event loop, in the order of
    their calls.

    Python cannot stop a thread: a function that never returns keeps its thread until the process ends.

    Attributes:
        progress: the number of functions that have returned, raised an error or timed out. A function whose call was
            cancelled does not count: otherwise one that hangs would look like progress.
    """

    def __init__(self, limit: int = 4) -> None:
        self.progress = 0
        self._limit = limit
        self._turns: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def __call__(self, function: Callable[[], A], *, limit: float, name: str) -> A:
        """Run a blocking function in a thread when its turn comes, and return its result.

        Args:
            limit: the seconds that the function may take once it has started.
            name: the function in errors.

        Raises:
            Unscored: it took more than `limit` seconds.
        """
        loop = asyncio.get_running_loop()
        if self._turns is None or self._turns[0] is not loop:  # a semaphore cannot be used in another event loop
            self._turns = (loop, asyncio.Semaphore(self._limit))
        async with self._turns[1]:
            with self.counted():
                return await in_own_thread(function, limit=limit, name=name)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the block as one function in `progress`, unless it is cancelled within the block."""
        try:
            yield
        except Exception:
            self.progress += 1
            raise
        self.progress += 1


async def in_own_thread(function: Callable[[], A], *, limit: float, name: str) -> A:
    """Run a blocking function in a new thread, and return its result.

    Args:
        limit: the seconds that the function may take.
        name: the function in errors.

    Raises:
        Unscored: it took more than `limit` seconds. Its thread continues.
    """
    outcome: Future[A] = Future()

    def run_function() -> None:
        with suppress(InvalidStateError):  # timed out or cancelled
            try:
                outcome.set_result(function())
            except BaseException as raised:
                # SystemExit would end the event loop, and asyncio does not allow StopIteration in a future.
                can_be_set = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
                outcome.set_exception(raised if can_be_set else RuntimeError(repr(raised)))

    # Not a thread of a pool: the interpreter would wait for it before it exits.
    waiting = asyncio.wrap_future(outcome)
    Thread(target=run_function, name=f"verifier {name}", daemon=True).start()
    return await await_within(limit, waiting, name)


class Batcher(Generic[A, B]):
    """Batcher that computes the outcomes of items in one thread, call by call.

    Args:
        compute: yields a pair of an item's index and its outcome for each of the items, in any order.
        name: a part of the thread's name.

    Attributes:
        progress: the number of outcomes so far.
    """

    def __init__(self, compute: Callable[[list[A]], Iterable[tuple[int, B]]], name: str) -> None:
        self._compute = compute
        self._pool = ThreadPoolExecutor(1, f"verify {name}")
        self.progress = 0

    async def __call__(self, items: Sequence[A]) -> list[B]:
        """Return the outcome of each item, in the order of the items.

        Raises:
            RuntimeError: the batcher is closed.
            Exception: the one that `compute` has raised.
        """

        def run_batch() -> list[B]:
            outcomes: dict[int, B] = {}
            for index, outcome in self._compute(list(items)):
                outcomes[index] = outcome
                self.progress += 1
            return [outcomes[index] for index in range(len(items))]

        return await asyncio.wrap_future(self._pool.submit(run_batch))

    def close(self) -> None:
        """Cancel all waiting calls; the one that is being computed is completed."""
        self._pool.shutdown(wait=False, cancel_futures=True)
