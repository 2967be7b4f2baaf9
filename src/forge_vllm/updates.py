"""Orders that change vLLM's weights and its memory, executed one after the other."""

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Literal

from .arguments import settle_future
from .handover import Handover

# How vLLM pauses for an update: the mode for running sequences, and whether keys and values are dropped.
PAUSE = {"continue": ("keep", False), "finish": ("wait", True), "recompute": ("keep", True)}

Command = Handover | Literal["release", "restore"]
Order = tuple[Command, "Future[None]"]


class Orders:
    """Queue of weight and memory orders, executed one by one, with a record of the requests in vLLM by vLLM's ids.

    Args:
        on_cpu: whether vLLM runs on a CPU, where its sleep mode does nothing.

    Attributes:
        llm: vLLM's engine, once it has started.
        weights: (version, identity) of all weights so far, by their label in vLLM, with which it marks each token; the
            last entry is in use.
        open: set while vLLM accepts requests; a release clears it.
        salt: prompts share blocks of vLLM's cache only if they have the same salt.
        unstarted: ids of requests without a token, in order.
        in_flight: ids of requests in vLLM.
        idle: set once `in_flight` is empty, for `_drain_requests`, which clears it.
    """

    def __init__(self, on_cpu: bool, version: int) -> None:
        self.llm: Any = None
        self.on_cpu = on_cpu
        self.open = asyncio.Event()
        self.open.set()
        self.salt = ""
        self.unstarted: dict[str, None] = {}
        self.in_flight: set[str] = set()
        self.idle = asyncio.Event()
        self.weights = {"default": (version, "")}
        self._orders: deque[Order] = deque()
        self._memory: Literal["allocated", "released", "restored"] = "allocated"

    def add(self, command: Command, future: Future[None]) -> None:
        """Append an order; `execute` settles its future."""
        if command == "release":
            self.open.clear()
        self._orders.append((command, future))

    def drop(self) -> None:
        """Drop all orders: the engine has ended, and has failed their futures."""
        for command, _ in self._orders:
            if isinstance(command, Handover):
                command.close()
        self._orders.clear()

    @property
    def current(self) -> str:
        """Return the label of the weights that vLLM uses."""
        return next(reversed(self.weights))

    def of_tokens(self, spans: Sequence[tuple[str, int]], start: int, end: int) -> tuple[list[int], dict[int, str]]:
        """Return the version of each token from `start` to `end` - 1, and the identity of each of these versions.

        Args:
            spans: (label, first token) of the weights that drew the sequence, in order.
        """
        versions: list[int] = []
        identities = {}
        # The weights of a label drew the tokens until the first one of the next label.
        for (label, first), span_end in zip(spans, [first for _, first in spans[1:]] + [end], strict=True):
            count = min(span_end, end) - max(first, start)
            if count > 0:
                version, identity = self.weights[label]
                versions += [version] * count
                identities[version] = identity
        return versions, identities

    async def execute(self, mode: str) -> None:
        """Execute the orders until there are no more.

        Errors of vLLM propagate: its weights may then be a mixture of two versions.

        Args:
            mode: the engine's setting `on_update`.
        """
        while self._orders:
            command, future = self._orders[0]
            if command == "release":
                await self._release_memory()
            elif command == "restore":
                await self._restore_memory()
            else:
                await self._update_weights(command, mode)

            if not self._orders:  # the engine has ended meanwhile
                return
            self._orders.popleft()
            if isinstance(command, Handover):
                command.close()
            settle_future(future)
            if self._memory == "allocated" and all(later != "release" for later, _ in self._orders):
                self.open.set()

    async def _update_weights(self, handover: Handover, mode: str) -> None:
        if self._memory == "allocated":
            pause, clear = PAUSE[mode]
            if mode == "finish":
                await self._drain_requests()
            await self.llm.pause_generation(mode=pause, clear_cache=clear)

        await self._restore_memory()
        await self.llm.collective_rpc("forge_load", args=(handover.path, handover.locations, handover.dtype))

        # From here on vLLM marks tokens with the new label.
        label = str(len(self.weights))
        await self.llm.update_weight_version(label)
        self.weights[label] = handover.version, handover.identity

        # Requests without a token start again: the keys and values of their prompts were computed with old weights.
        if mode == "continue":
            self.salt = label
            await self.llm.abort([*self.unstarted])

        if self._memory == "restored" and not self.on_cpu:
            await self.llm.wake_up(["kv_cache"])  # which resumes, too
        else:
            await self.llm.resume_generation()

        self._memory = "allocated"

    async def _drain_requests(self) -> None:
        """Wait until vLLM has no requests. Those without a token are aborted, and start again once `open` is set.

        vLLM's own pause with mode "wait" ignores preempted sequences, which would continue afterwards.
        """
        self.open.clear()
        await self.llm.abort([*self.unstarted])
        while self.in_flight:
            self.idle.clear()
            await self.idle.wait()

    async def _release_memory(self) -> None:
        if self._memory == "released":
            return
        await self._drain_requests()
        if self.on_cpu:
            await self.llm.pause_generation(mode="wait", clear_cache=True)
            await self.llm.collective_rpc("forge_release")
        else:
            await self.llm.sleep(level=2, mode="wait")
        self._memory = "released"

    async def _restore_memory(self) -> None:
        if self._memory != "released":
            return
        if self.on_cpu:
            await self.llm.collective_rpc("forge_restore")
        else:
            await self.llm.wake_up(["weights"])
        self._memory = "restored"
