"""Blocking functions alongside the event loop: with a time limit, or one after the other."""

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
    """Await `call` with a time limit, which restarts as long as `progress()` changes. On timeout it is cancelled.

    Raises:
        Unscored: `limit` seconds passed without progress, or the call was cancelled.
        RuntimeError: the call raised SystemExit.
    """

    async def without_exit() -> A:
        try:
            return await call
        except SystemExit as error:  # would end the event loop
            raise RuntimeError(repr(error)) from None

    # The limit starts again whenever there was progress; without a measure of progress it never does.
    task = asyncio.create_task(without_exit())
    try:
        last = progress()
        while not (await asyncio.wait((task,), timeout=limit))[0]:
            now = progress()
            if now == last:
                raise Unscored(f"{name} {'took more than' if now is None else 'made no progress for'} {limit:g} s")
            last = now
        if task.cancelled():
            raise Unscored(f"{name} was cancelled")
        return task.result()
    finally:
        task.cancel()


class Turns:
    """Runs functions in threads, at most `limit` at a time in an event loop, first come first served.

    Python cannot stop a thread: a function that never returns keeps its thread until the process ends.

    Attributes:
        progress: number of functions that returned, raised or timed out. A function whose call was cancelled does not
            count, so that a hanging one is not progress.
    """

    def __init__(self, limit: int = 4) -> None:
        self.progress = 0
        self._limit = limit
        self._turns: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def __call__(self, function: Callable[[], A], *, limit: float, name: str) -> A:
        """Return the function's result. Unscored: it took more than `limit` seconds, not counting the wait for a
        turn."""
        loop = asyncio.get_running_loop()
        if self._turns is None or self._turns[0] is not loop:  # a semaphore belongs to a loop
            self._turns = (loop, asyncio.Semaphore(self._limit))
        async with self._turns[1]:
            with self.counted():
                return await in_own_thread(function, limit=limit, name=name)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the block as one function in `progress`, unless it is cancelled."""
        try:
            yield
        except Exception:
            self.progress += 1
            raise
        self.progress += 1


async def in_own_thread(function: Callable[[], A], *, limit: float, name: str) -> A:
    """Return the result of a function in a separate thread. Unscored: it took more than `limit` seconds."""
    outcome: Future[A] = Future()

    def run_function() -> None:
        with suppress(InvalidStateError):  # timed out or cancelled
            try:
                outcome.set_result(function())
            except BaseException as raised:
                # SystemExit would end the loop, and a future cannot carry StopIteration.
                carried = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
                outcome.set_exception(raised if carried else RuntimeError(repr(raised)))

    # Not a pool's thread, which the interpreter would wait for at its end.
    waiting = asyncio.wrap_future(outcome)
    Thread(target=run_function, name=f"verifier {name}", daemon=True).start()
    return await await_within(limit, waiting, name)


class Batcher(Generic[A, B]):
    """Runs `compute` for one call after the other, in one thread.

    Args:
        compute: yields (index of the item, outcome) for all items, in any order.
        name: of the thread.

    Attributes:
        progress: number of outcomes so far.
    """

    def __init__(self, compute: Callable[[list[A]], Iterable[tuple[int, B]]], name: str) -> None:
        self._compute = compute
        self._pool = ThreadPoolExecutor(1, f"verify {name}")
        self.progress = 0

    async def __call__(self, items: Sequence[A]) -> list[B]:
        """Return the outcome of each item. RuntimeError: the batcher is closed; else the exception of `compute`."""

        def run_batch() -> list[B]:
            outcomes: dict[int, B] = {}
            for index, outcome in self._compute(list(items)):
                outcomes[index] = outcome
                self.progress += 1
            return [outcomes[index] for index in range(len(items))]

        return await asyncio.wrap_future(self._pool.submit(run_batch))

    def close(self) -> None:
        """Cancel all waiting calls; the one that is being computed ends on its own."""
        self._pool.shutdown(wait=False, cancel_futures=True)
