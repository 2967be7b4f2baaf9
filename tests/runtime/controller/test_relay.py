"""Calls of services from other processes, whose callers end before they are answered."""

import asyncio
import os
import signal
import threading

import pytest

from forge.runtime.controller import ForgeActor, endpoint, run
from tests.runtime.controller.components import Counter

pytestmark = pytest.mark.processes


class Caller(ForgeActor):
    """Calls a service from its process."""

    def __init__(self, service) -> None:
        self.service = service

    @endpoint
    async def ask(self, seconds: float) -> int:
        return await self.service.overlap.route(seconds)

    @endpoint
    async def process(self) -> int:
        return os.getpid()


class Once:
    """Arrives as a lock, which cannot be sent on."""

    def __reduce__(self):
        return threading.Lock, ()


class Unsendable(ForgeActor):
    """Returns what arrives in the controller, and not in a caller beyond it."""

    @endpoint
    async def overlap(self, seconds: float) -> object:
        return Once()


async def test_unpicklable_endpoint_result_raises_at_caller():
    caller = await Caller.as_service(await Unsendable.as_service())
    with pytest.raises(Exception, match=r"cannot pickle '_thread\.lock'"):
        await asyncio.wait_for(caller.ask.route(0.0), 60)


@pytest.mark.full
def test_killed_calling_component_is_replaced_and_call_completes():
    async def main() -> None:
        counter = await Counter.as_service()
        caller = await Caller.as_service(counter)
        process = await caller.process.route()
        asking = asyncio.create_task(caller.ask.route(1.0))
        while not await counter.running_now.route():
            await asyncio.sleep(0.01)
        os.kill(process, signal.SIGKILL)
        assert await asking in (1, 2)
        assert await caller.process.route() != process
        assert await (await Caller.as_service(counter)).ask.route(0.0) in (1, 2)

    for _ in range(2):
        run(main())
