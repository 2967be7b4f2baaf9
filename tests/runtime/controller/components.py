"""Components that tests start in real processes."""

import asyncio
import os
import signal
import time
from pathlib import Path

from monarch.actor import endpoint as monarch_endpoint

from forge.observability import Reduce, phase, record_metric
from forge.runtime.controller import ForgeActor, Unrecoverable, endpoint, request_id


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
        try:
            await asyncio.sleep(seconds)
        finally:
            self.running -= 1
        return self.most_running

    @endpoint
    async def running_now(self) -> int:
        return self.running

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
    def exit(self) -> None:
        os._exit(3)

    @endpoint
    async def once(self, fault: str, flag: Path) -> int:
        """Misbehaves for the one call that finds the file `flag`; afterwards answers with its pid."""
        if found(flag):
            if fault == "loop":
                while True:
                    pass
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])
            await asyncio.sleep(60)
        return os.getpid()

    @endpoint
    def lose_a_peer(self, flag: Path) -> int:
        """For the one call that finds the file `flag`: the last rank dies, just after the others have raised."""
        if not flag.exists():
            return self.context.rank
        if self.context.rank == self.context.world_size - 1:
            time.sleep(0.1)
            flag.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        raise ConnectionError("closed by a peer")

    @endpoint
    def hoard(self, gigabytes: float) -> None:
        self.held = bytearray(int(gigabytes * 1e9))

    @endpoint
    def loop_in_thread(self) -> None:
        while True:
            pass

    @endpoint
    def record(self, value: float) -> None:
        with phase("recording"):
            record_metric("value", value)
            record_metric("value", value, Reduce.MAX)

    @endpoint
    def environment(self, name: str) -> str | None:
        return os.environ.get(name)


def found(flag: Path) -> bool:
    """Whether the file is there; it is not afterwards."""
    try:
        flag.unlink()
    except FileNotFoundError:
        return False
    return True


class Replayed(ForgeActor):
    """Shows what a replaced replica is given before it serves."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.version = 0
        self.calls: list[str] = []

    def setup(self) -> None:
        self.calls.append("setup")
        broken = self.folder / "broken"
        if broken.exists():
            broken.write_text(str(int(broken.read_text()) - 1))
            if broken.read_text() == "0":
                broken.unlink()
            raise RuntimeError("the disk is on fire")

    def on_respawn(self) -> None:
        self.calls.append(f"on_respawn {self.context.incarnation}")
        if (self.folder / "hopeless").exists():
            raise Unrecoverable("nothing was saved")

    @endpoint(catch_up=True)
    async def update(self, version: int) -> int:
        if version < 0:
            raise ValueError("no such version")
        self.version = version
        self.calls.append(f"update {version}")
        return version

    @endpoint
    async def state(self) -> tuple[int, list[str], int]:
        return self.version, self.calls, os.getpid()

    @endpoint
    def act(self) -> str | None:
        """Writes its request id down, and dies the first time."""
        with (self.folder / "acts").open("a") as acts:
            acts.write(f"{request_id()}\n")
        if len((self.folder / "acts").read_text().splitlines()) == 1:
            os._exit(1)
        return request_id()


class Caller(ForgeActor):
    """Calls another service from inside its own process."""

    def __init__(self, counter) -> None:
        self.counter = counter

    @endpoint
    async def add_through(self, n: int) -> int:
        return await self.counter.add.route(n)

    @endpoint
    async def places(self, calls: int) -> list[str]:
        async with self.counter.session():
            return [(await self.counter.where.route())[0] for _ in range(calls)]

    @endpoint
    async def everyone(self) -> list[tuple[str, int]]:
        return await self.counter.where.fanout()

    @endpoint
    async def fail_through(self) -> None:
        await self.counter.fail.route("far away")

    @endpoint
    async def wait_through(self, seconds: float) -> None:
        await self.counter.overlap.route(seconds)

    @endpoint
    async def impatient(self) -> None:
        await self.counter.overlap.options(timeout=0.2).route(30)


class Odd(Exception):
    """Cannot be rebuilt from its own arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first}{second}")


class Joined(ForgeActor):
    """Two ranks that form a torch.distributed group."""

    def setup(self) -> None:
        from forge.runtime.process_groups import process_store
        from forge.training.distributed import join_ranks

        store = process_store(self.context.rendezvous, self.context.world_size)
        self.ranks = join_ranks(self.context.rank, self.context.world_size, store)

    def teardown(self) -> None:
        from forge.training.distributed import leave_ranks

        leave_ranks()

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


class FromMonarch(ForgeActor):
    """Written for Monarch: its decorator, and `setup` as an endpoint."""

    @monarch_endpoint
    async def setup(self):
        self.calls = 1

    @monarch_endpoint
    async def add(self, n: int) -> int:
        self.calls += n
        return self.calls

    @monarch_endpoint
    def where(self) -> int:
        return os.getpid()
