"""Fanouts to replicas that live together: one message for each process, and the answers of separate ones."""

import asyncio
import os
import signal
import threading

import pytest

from forge.runtime.controller import CallTimeout, ForgeActor, RemoteError, endpoint, request_id

pytestmark = pytest.mark.processes


MEETING = threading.Barrier(4)


class Light(ForgeActor):
    """Keeps what it was given."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []
        self.version = -1

    @endpoint
    async def keep(self, numbers: list[int]) -> list[int]:
        numbers.append(self.context.replica)
        self.given.append(numbers)
        await asyncio.sleep(0.01)
        return self.given[-1]

    @endpoint
    def fail_at(self, index: int) -> int:
        if self.context.replica == index:
            raise KeyError(f"number {index}")
        return index

    @endpoint
    async def asked(self) -> tuple[int, str | None]:
        return os.getpid(), request_id()

    @endpoint
    async def wait_at(self, index: int, seconds: float) -> int:
        await asyncio.sleep(seconds if self.context.replica == index else 0.0)
        return self.context.replica

    @endpoint
    def meet(self) -> int:
        """Returns once it runs in four replicas of this process."""
        return MEETING.wait(60)

    @endpoint
    async def wait_for_release(self) -> int:
        self.released = asyncio.Event()
        await self.released.wait()
        return self.context.replica

    @endpoint
    async def lock_of(self, index: int) -> object:
        return threading.Lock() if self.context.replica == index else index

    @endpoint
    async def release(self) -> None:
        self.released.set()

    @endpoint(catch_up=True)
    async def load(self, version: int) -> int:
        self.version = version
        return version

    @endpoint
    async def loaded(self) -> int:
        return self.version


async def test_light_replicas_of_one_process_answer_fanout_separately():
    service = await Light.options(num_replicas=8, per_process=4).as_service()
    assert await service.keep.fanout([7]) == [[7, index] for index in range(8)]
    assert await service.keep.fanout(numbers=[]) == [[index] for index in range(8)]
    asked = await service.asked.fanout()
    assert (len({pid for pid, _ in asked}), len({request for _, request in asked})) == (2, 8)
    both = await asyncio.gather(service.keep.fanout([1]), service.wait_at.fanout(-1, 0.0), service.keep.route([2]))
    assert (both[0], both[1]) == ([[1, index] for index in range(8)], list(range(8)))


async def test_light_replica_error_does_not_affect_others():
    service = await Light.options(num_replicas=4, per_process=4).as_service()
    with pytest.raises(KeyError, match="number 2"):
        await service.fail_at.fanout(2)
    assert await service.fail_at.fanout(9) == [9] * 4
    with pytest.raises(Exception, match="cannot pickle"):
        await service.keep.fanout([threading.Lock()])
    assert await service.fail_at.fanout(9) == [9] * 4
    with pytest.raises(RemoteError, match=r"cannot pickle.*"):
        await service.lock_of.fanout(2)
    assert await service.lock_of.fanout(9) == [9] * 4
    assert all(replica.state == "up" for replica in service.status().replicas)


async def test_call_to_slow_light_replica_is_cancelled_with_replica_name():
    service = await Light.options(num_replicas=4, per_process=4).as_service()
    with pytest.raises(CallTimeout, match=r"light\[3\].wait_at gave no answer within 1.5 s"):
        await service.wait_at.options(timeout=1.5).fanout(3, 60.0)
    assert await service.wait_at.fanout(-1, 0.0) == [0, 1, 2, 3]


async def test_fanout_is_repeated_on_replaced_light_replica_process():
    service = await Light.options(num_replicas=8, per_process=4).as_service()
    assert await service.load.fanout(3) == [3] * 8
    pids = list(dict.fromkeys(pid for pid, _ in await service.asked.fanout()))
    waiting = asyncio.create_task(service.wait_at.fanout(0, 2.0))
    await asyncio.sleep(0.5)
    os.kill(pids[1], signal.SIGKILL)
    assert await waiting == list(range(8))
    assert await service.loaded.fanout() == [3] * 8
    assert len({pid for pid, _ in await service.asked.fanout()}) == 2


async def test_slow_light_replica_does_not_block_others():
    service = await Light.options(num_replicas=4, per_process=4).as_service()
    waiting = asyncio.create_task(service.wait_at.fanout(2, 60.0))
    while [replica.in_flight for replica in service.status().replicas] != [0, 0, 1, 0]:
        await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert await service.wait_at.fanout(-1, 0.0) == [0, 1, 2, 3]


async def test_light_route_and_fanout_share_an_event_loop():
    service = await Light.options(num_replicas=4, per_process=4).as_service()
    waiting = asyncio.gather(*(service.wait_for_release.route() for _ in range(4)))
    while sum(replica.in_flight for replica in service.status().replicas) < 4:
        await asyncio.sleep(0.01)
    await service.asked.fanout()
    await service.release.fanout()
    assert sorted(await asyncio.wait_for(waiting, 30)) == [0, 1, 2, 3]
