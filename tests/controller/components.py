"""Components that tests start in real processes."""

import asyncio
import ctypes
import os
import time

from forge.controller import ForgeActor, endpoint
from forge.observability import Reduce, phase, record_metric


class Counter(ForgeActor):
    """Counts, says where it runs, and misbehaves on request."""

    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.running = self.most_running = 0

    def setup(self) -> None:
        if self.count < 0:
            raise ValueError("cannot start below zero")

    @endpoint
    def add(self, n: int) -> int:
        self.count += n
        return self.count

    @endpoint
    def slow_add(self, n: int, seconds: float) -> int:
        before = self.count
        time.sleep(seconds)
        self.count = before + n
        return self.count

    @endpoint
    async def where(self) -> tuple[str, int]:
        return str(self.context), os.getpid()

    @endpoint
    async def overlap(self, seconds: float) -> int:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(seconds)
        self.running -= 1
        return self.most_running

    @endpoint
    def fail(self, message: str) -> None:
        raise KeyError(message)

    @endpoint
    async def leave(self) -> None:
        raise SystemExit(0)

    @endpoint
    async def fail_oddly(self) -> None:
        raise Odd("a", "b")

    @endpoint
    def hold_the_interpreter(self) -> None:
        """Sleep without ever giving up the interpreter lock: nothing else in this process can run."""
        ctypes.PyDLL(None).sleep(600)

    @endpoint
    def exit(self) -> None:
        os._exit(3)

    @endpoint
    def record(self, value: float) -> None:
        with phase("recording"):
            record_metric("value", value)
            record_metric("value", value, Reduce.MAX)

    @endpoint
    def environment(self, name: str) -> str | None:
        return os.environ.get(name)


class Odd(Exception):
    """Cannot be rebuilt from its own arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first}{second}")


class Joined(ForgeActor):
    """Two ranks that form a torch.distributed group."""

    def setup(self) -> None:
        from forge.training.distributed import join

        self.ranks = join(self.context.rank, self.context.world_size, self.context.rendezvous)

    def teardown(self) -> None:
        from forge.training.distributed import leave

        leave()

    @endpoint
    def fail_on_the_last_rank(self) -> None:
        if self.context.rank == self.context.world_size - 1:
            raise MemoryError("the last rank has no room")
        import torch

        self.ranks.sum(torch.zeros(1))

    @endpoint
    def sum_of_ranks(self) -> float:
        import torch

        return float(self.ranks.sum(torch.tensor(float(self.context.rank + 1))))
