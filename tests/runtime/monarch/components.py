"""Components that are written with Monarch's own decorators."""

from __future__ import annotations

import asyncio
from collections import deque

from monarch.actor import Actor, ActorError, concurrent_endpoint
from monarch.actor import endpoint as monarch_endpoint

from forge.runtime.controller import ForgeActor


class Mailbox(ForgeActor):
    """A queue whose readers wait for the next letter."""

    def __init__(self) -> None:
        self.letters: deque[str] = deque()
        self.waiting: deque = deque()
        self.meetings = 0
        self.arrived = asyncio.Event()

    @monarch_endpoint
    def put(self, letter: str) -> int:
        self.deliver(letter)
        return len(self.letters)

    def deliver(self, letter: str) -> None:
        if self.waiting:
            self.waiting.popleft().send(letter)
        else:
            self.letters.append(letter)

    @monarch_endpoint(explicit_response_port=True)
    def get(self, port) -> None:
        if self.letters:
            port.send(self.letters.popleft())
        else:
            self.waiting.append(port)

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

    @concurrent_endpoint(explicit_response_port=True)
    async def early(self, port, number: int) -> None:
        """Answer, and work on."""
        port.send(number)
        port.send(-1)
        await asyncio.sleep(0.01)
        self.deliver(f"after {number}")

    @concurrent_endpoint(explicit_response_port=True, propagate="inspect")
    async def deny(self, port, wrapped: bool) -> None:
        error = PermissionError("not today")
        port.exception(ActorError(error, "Actor call failed.") if wrapped else error)

    @monarch_endpoint(explicit_response_port=True)
    def silent(self, port) -> None:
        """Never answer."""

    @monarch_endpoint(explicit_response_port=True)
    async def broken(self, port, *, before: bool) -> None:
        if not before:
            port.send("sent")
        raise ValueError("broken")


class Plain(Actor):
    """An actor of Monarch's that no service knows."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    @monarch_endpoint
    def add(self, number: int) -> int:
        self.count += number
        return self.count
