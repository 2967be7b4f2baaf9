"""Hash and copy in several threads, which is faster as both release the GIL."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

A = TypeVar("A")
B = TypeVar("B")

THREADS = 8  # at most: more do not help once the machine's memory is busy
# Bytes from which several threads are used. A smaller version takes a tenth of a second in one thread, and on a machine
# without an accelerator the other cores decode meanwhile.
LARGE = 1 << 30


def in_threads(function: Callable[[A], B], items: Iterable[A], size: int) -> Iterator[B]:
    """Yield `function(item)` for each item, in order, computed ahead in several threads.

    At most two results for each thread are computed ahead of the one that is yielded, which bounds the memory.

    Args:
        size: bytes of all items together; below LARGE the caller's own thread computes them, one by one.
    """
    threads = min(THREADS, len(os.sched_getaffinity(0))) if size >= LARGE else 1
    if threads == 1:
        yield from map(function, items)
        return

    # Each thread copies with one thread of torch: with torch's own pool for each there would be more threads than
    # cores.
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
