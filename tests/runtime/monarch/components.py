"""Components that are written with Monarch's own decorators."""

import asyncio

from monarch.actor import Actor, concurrent_endpoint, endpoint as monarch_endpoint

from forge.runtime.controller import ForgeActor


class Mailbox(ForgeActor):
    """Letters, and calls that wait for one another."""

    def __init__(self) -> None:
        self.letters: list[str] = []
        self.meetings = 0
        self.arrived = asyncio.Event()

    @monarch_endpoint
    def put(self, letter: str) -> int:
        self.letters.append(letter)
        return len(self.letters)

    @concurrent_endpoint
    async def meet(self, number: int) -> int:
        """Return once as many calls as `number` are in it: they would wait for ever one after the other."""
        self.meetings += 1
        if self.meetings == number:
            self.arrived.set()
        await self.arrived.wait()
        return self.meetings

    @concurrent_endpoint(instrument=False)
    async def fail(self, text: str) -> None:
        raise KeyError(text)


class Plain(Actor):
    """An actor of Monarch's that no service knows."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    @monarch_endpoint
    def add(self, number: int) -> int:
        self.count += number
        return self.count
