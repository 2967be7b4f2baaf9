"""Orders that change vLLM's weights and its memory, executed one after the other; and labels of the weights."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

from .arguments import settle
from .handover import Handover

# How vLLM pauses for an update: the mode for running sequences, and whether keys and values are dropped.
PAUSE = {"continue": ("keep", False), "finish": ("wait", True), "recompute": ("keep", True)}

Command = Handover | Literal["release", "restore"]
Order = tuple[Command, "Future[None]"]


class WeightLabels:
    """vLLM's labels of the weights of each update, which its completions carry by token.

    Attributes:
        current: the label of the weights in use.
    """

    def __init__(self, version: int, identity: str) -> None:
        self.current = "default"
        self._weights = {
            self.current: (version, identity)
        }  # in order: the current ones, and those of running sequences
        self._count = 0

    @property
    def weights(self) -> tuple[int, str]:
        """Version and identity of the weights in use."""
        return self._weights[self.current]

    def add(self, label: str, version: int, identity: str) -> None:
        """Use the weights of this label from here on."""
        self.current = label
        self._weights[label] = version, identity

    def make(self) -> str:
        """Return a new label."""
        self._count += 1
        return str(self._count)

    def forget(self, needed: Iterable[str]) -> None:
        """Forget the oldest labels, up to the first that is needed."""
        kept = {self.current, *needed}
        for unused in takewhile(lambda label: label not in kept, [*self._weights]):
            del self._weights[unused]

    def of_tokens(self, spans: Sequence[tuple[str, int]], start: int, end: int) -> tuple[list[int], dict[int, str]]:
        """Return the versions of the tokens from `start` to `end`, and their identities.

        Args:
            spans: labels, each with the first token that its weights drew.
        """
        versions: list[int] = []
        identities = {}
        # Each label from its first token to the next one's.
        span_ends = [first for _, first in spans[1:]] + [end]
        for (label, first), span_end in zip(spans, span_ends, strict=True):
            count = min(span_end, end) - max(first, start)
            if count > 0:
                version, identity = self._weights[label]
                versions += [version] * count
                identities[version] = identity
        return versions, identities


@dataclass
class Traffic:
    """The requests in vLLM, by its names for them.

    Attributes:
        open: whether vLLM accepts requests; cleared by a release.
        salt: prompts share blocks of vLLM's cache only under the same one.
        unstarted: requests without a token, in order.
        in_flight: requests in vLLM, with the label of the weights at their submission.
        idle: set while there are none.
    """

    open: asyncio.Event = field(default_factory=asyncio.Event)
    salt: str = ""
    unstarted: dict[str, None] = field(default_factory=dict)
    in_flight: dict[str, str] = field(default_factory=dict)
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class Orders:
    """Executes orders one by one; of consecutive updates only the newest, for all of them.

    Args:
        mode: on_update of the engine.
        on_cpu: whether vLLM runs on a CPU, where its sleep mode does nothing.

    Attributes:
        llm: vLLM's engine, once it has started.
    """

    def __init__(self, mode: str, on_cpu: bool, traffic: Traffic, labels: WeightLabels) -> None:
        self.llm: Any = None
        self.mode = mode
        self.on_cpu = on_cpu
        self.traffic = traffic
        self.labels = labels
        self._orders: deque[Order] = deque()
        self._memory: Literal["allocated", "released", "restored"] = "allocated"

    def add(self, command: Command, future: Future[None]) -> None:
        """Append an order; `execute` settles its future."""
        if command == "release":
            self.traffic.open.clear()
        self._orders.append((command, future))

    def drop(self) -> None:
        """Drop all orders: the engine has ended, and has failed their futures."""
        for command, _ in self._orders:
            if isinstance(command, Handover):
                command.close()
        self._orders.clear()

    async def execute(self) -> None:
        """Execute the orders until there are no more. What vLLM raises passes: the weights may be half of one version
        and half of another then."""
        while self._orders:
            command = self._orders[0][0]
            count = 1
            if command == "release":
                await self._release()
            elif command == "restore":
                await self._restore()
            else:
                count = await self._update()
            if not self._orders:  # the engine has ended meanwhile
                return
            for command, future in [self._orders.popleft() for _ in range(count)]:
                if isinstance(command, Handover):
                    command.close()
                settle(future)
            if self._memory == "allocated" and all(command != "release" for command, _ in self._orders):
                self.traffic.open.set()

    async def _update(self) -> int:
        """Load the newest of the updates that are next; return their number."""
        if self._memory == "allocated":
            pause, clear = PAUSE[self.mode]
            if self.mode == "finish":
                await self._drain()
            await self.llm.pause_generation(mode=pause, clear_cache=clear)
        await self._restore()
        updates = [update for update, _ in takewhile(lambda order: isinstance(order[0], Handover), self._orders)]
        newest = updates[-1]
        assert isinstance(newest, Handover)
        await self.llm.collective_rpc("forge_load", args=(newest.path, newest.locations, newest.dtype))
        # From here on vLLM marks tokens with the new label; older ones are needed while requests carry them.
        label = self.labels.make()
        await self.llm.update_weight_version(label)
        self.labels.add(label, newest.version, newest.identity)
        self.labels.forget(self.traffic.in_flight.values())

        # Requests without a token start again: their prompts' keys and values are of the old weights.
        if self.mode == "continue":
            self.traffic.salt = label
            await self.llm.abort([*self.traffic.unstarted])
        if self._memory == "restored" and not self.on_cpu:
            await self.llm.wake_up(["kv_cache"])  # which resumes, too
        else:
            await self.llm.resume_generation()
        self._memory = "allocated"
        return len(updates)

    async def _drain(self) -> None:
        """Wait until vLLM has no requests. Unstarted ones wait until `open` is set.

        vLLM's own waiting pause ignores preempted sequences, which would continue afterwards.
        """
        self.traffic.open.clear()
        await self.llm.abort([*self.traffic.unstarted])
        while self.traffic.in_flight:
            self.traffic.idle.clear()
            await self.traffic.idle.wait()

    async def _release(self) -> None:
        if self._memory == "released":
            return
        await self._drain()
        if self.on_cpu:
            await self.llm.pause_generation(mode="wait", clear_cache=True)
            await self.llm.collective_rpc("forge_release")
        else:
            await self.llm.sleep(level=2, mode="wait")
        self._memory = "released"

    async def _restore(self) -> None:
        if self._memory != "released":
            return
        if self.on_cpu:
            await self.llm.collective_rpc("forge_restore")
        else:
            await self.llm.wake_up(["weights"])
        self._memory = "restored"
