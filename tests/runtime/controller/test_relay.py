"""Calls of services from other processes, whose callers end before they are answered."""

import asyncio
import os
import signal
import threading

import pytest

from forge.runtime.controller import ForgeActor, endpoint, run
from tests.runtime.controller.components import Counter

pytestmark = pytest.mark.processes

# Calls at a time of each caller.
CALLS = 400


class Answers(ForgeActor):
    """Answers after a while, and counts what it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    @endpoint
    async def overlap(self, seconds: float) -> int:
        self.asked += 1
        await asyncio.sleep(seconds)
        return self.asked

    @endpoint
    async def count(self) -> int:
        return self.asked


class Caller(ForgeActor):
    """Calls a service from its process."""

    def __init__(self, service) -> None:
        self.service = service

    @endpoint
    async def ask(self, seconds: float) -> int:
        return await self.service.overlap.route(seconds)

    @endpoint
    async def ask_often(self, calls: int) -> None:
        """Calls that are answered one after the other, every few milliseconds, until this process is stopped."""

        async def ask_again(seconds: float) -> None:
            while True:
                await self.service.overlap.route(seconds)

        await asyncio.gather(*(ask_again(0.2 + 0.002 * number) for number in range(calls)))

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


def test_an_answer_that_cannot_be_sent_is_an_error_of_its_caller():
    async def main() -> None:
        caller = await Caller.as_service(await Unsendable.as_service())
        with pytest.raises(Exception, match=r"cannot pickle '_thread\.lock'"):
            await asyncio.wait_for(caller.ask.route(0.0), 60)

    run(main())


async def fail_in_calls() -> None:
    """Fail while four processes wait for hundreds of answers, at whatever rate this machine gives them."""
    answers = await Answers.as_service()
    callers = [await Caller.options(mesh_name=f"caller{number}").as_service(answers) for number in range(4)]
    calls = [asyncio.create_task(caller.ask_often.route(CALLS)) for caller in callers]
    for call in calls:
        # The run fails before they do: unread, their errors would be logged when they are collected, at any later time.
        call.add_done_callback(lambda task: task.cancelled() or task.exception())
    while await answers.count.route() < len(calls) * CALLS // 2:
        await asyncio.sleep(0.01)
    raise KeyError("the run ends while they are called")


@pytest.mark.parametrize("runs", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_a_run_that_fails_in_calls_harms_no_later_run_of_this_process(runs: int):
    """The answers go to callers that are stopped: Monarch would take that for the failure of this process."""
    for _ in range(runs):
        with pytest.raises(KeyError, match="the run ends"):
            run(fail_in_calls())


def test_a_caller_that_is_killed_in_its_call_is_replaced_and_answered():
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
