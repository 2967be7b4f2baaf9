"""Where rollouts wait for the trainer."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any, Literal

from ..controller import ForgeActor, endpoint
from ..observability import Reduce, phase, record_metric
from .contents import Contents, Item
from .ledger import Ledger


class ReplayBuffer(ForgeActor):
    """Episodes or groups, bounded in number and in age.

    `add` waits while the buffer is full (back-pressure); `sample` waits until there is enough that is young enough.
    What is dropped is counted with its reason. A group with an unscored episode keeps the others if two remain. A group
    that has an index is taken once: one that comes again is dropped.

    Args:
        capacity: most items held.
        max_policy_age: an item whose oldest token was sampled more than this many versions ago is dropped; None keeps
            any age.
        order: "fifo" or "random" (without replacement).
        replace: drop groups whose rewards are all equal, for others to come in their place, at most so many for one
            `sample`: where a policy is right or wrong about everything, the search must end.
        seed: of the random order.
        journal: file from which a replaced buffer takes up what was held; None makes the loss of its process the end
            of the run.
    """

    def __init__(
        self,
        capacity: int = 4096,
        *,
        max_policy_age: int | None = None,
        order: Literal["fifo", "random"] = "fifo",
        seed: int = 0,
        replace: int = 0,
        journal: str | None = None,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        if max_policy_age is not None and max_policy_age < 0:
            raise ValueError(f"max_policy_age must be None or at least 0, got {max_policy_age}")
        if order not in ("fifo", "random"):
            raise ValueError(f"order must be fifo or random, got {order!r}")
        self.capacity = capacity
        self.contents = Contents(max_policy_age, order, seed, replace)
        self.changed = asyncio.Condition()
        lost = "the items in the replay buffer are lost: give ReplayBuffer a journal= to keep them"
        self.ledger = Ledger(self, journal, lost=lost, state=self.contents.state_dict)

    def setup(self) -> None:
        self.ledger.begin()

    def on_respawn(self) -> None:
        self.ledger.replay(self.contents.load_state_dict, self._apply)

    @endpoint
    async def add(self, item: Item) -> bool:
        """Put one item in, waiting for room. Returns False if it was dropped: unscored, repeated or too old by then."""
        if self.ledger.repeated:
            return self.ledger.answer
        async with self.changed:
            await self.changed.wait_for(lambda: self._size < self.capacity or not self.contents.admits(item))
            return self._complete("add", item)

    @endpoint
    async def sample(self, version: int, batch_size: int) -> list[Item]:
        """Take `batch_size` items to train `version`, waiting until they are there. Each item is taken once."""
        if batch_size > self.capacity:
            raise ValueError(f"a batch of {batch_size} can never be drawn from a buffer of {self.capacity}")
        if self.ledger.repeated:
            return self.ledger.answer
        async with self.changed:
            self.ledger.enter(("expire", version))
            self._change("expire", version)
            with phase("wait_for_batch"):
                await self.changed.wait_for(lambda: self._size >= batch_size)
            taken = self._complete("take", batch_size)
        record_metric("buffer/size", self._size)
        return taken

    @endpoint
    async def expire(self, version: int) -> int:
        """Drop what is too old to train `version`, now and from here on; returns how many items that were."""
        if self.ledger.repeated:
            return self.ledger.answer
        async with self.changed:
            return self._complete("expire", version)

    @endpoint
    async def counts(self) -> dict[str, int]:
        """Items held, and items dropped since the start by reason."""
        return {"size": self._size, **self.contents.dropped}

    @endpoint
    async def state_dict(self) -> dict[str, Any]:
        """Everything held, the counters and the random state."""
        return copy.deepcopy(self.contents.state_dict())

    @endpoint
    async def load_state_dict(self, state: dict[str, Any], forgotten: Sequence[int] = ()) -> int:
        """Take up a saved state in place of the current one; returns how many items it holds.

        Args:
            forgotten: indices of groups that can no longer come in, to be counted as dropped.
        """
        if self.ledger.repeated:
            return self.ledger.answer
        async with self.changed:
            self.contents.load_state_dict(state)
            self._change("forget", forgotten)
            return self.ledger.restart(self.contents.state_dict(), self._size)

    @property
    def _size(self) -> int:
        return len(self.contents.items)

    def _complete(self, operation: str, argument: Any) -> Any:
        return self.ledger.complete((operation, argument), self._change(operation, argument))

    def _change(self, operation: str, argument: Any) -> Any:
        """Apply an operation and tell of it; holds the condition."""
        before = dict(self.contents.dropped)
        answer = self._apply((operation, argument))
        for reason, number in self.contents.dropped.items():
            if number > before[reason]:
                record_metric(f"dropped/{reason}", number - before[reason], Reduce.SUM)
        self.changed.notify_all()
        return answer

    def _apply(self, change: tuple[str, Any]) -> Any:
        operation, argument = change
        return getattr(self.contents, operation)(argument)
