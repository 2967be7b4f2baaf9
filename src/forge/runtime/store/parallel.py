"""Hashing and copying in several threads: both leave Python's lock to others."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

A = TypeVar("A")
B = TypeVar("B")

THREADS = 8  # at most: by then a machine's memory is busy
# Bytes from which it is worth while: a smaller version takes a tenth of a second, and on a CPU the other cores decode.
LARGE = 1 << 30


def in_threads(function: Callable[[A], B], items: Iterable[A], size: int) -> Iterator[B]:
    """Yield the results of a function of each item, in order; no more than two a thread wait to be taken.

    Args:
        size: bytes of all items together; a small transfer has one thread.
    """
    threads = min(THREADS, len(os.sched_getaffinity(0))) if size >= LARGE else 1
    if threads == 1:
        yield from map(function, items)
        return

    # Each copies by itself: torch's own threads would be more than there are cores.
    with ThreadPoolExecutor(threads, "forge-weights", initializer=torch.set_num_threads, initargs=(1,)) as pool:
        pending: deque[Future[B]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > 2 * threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
