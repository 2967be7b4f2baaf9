"""Where rollouts wait for the trainer."""

from __future__ import annotations

import asyncio
import copy
import random
from typing import Any, Literal

from ..controller import ForgeActor, endpoint
from ..observability import Reduce, phase, record_metric
from ..types import Episode, Group

Item = Episode | Group


class ReplayBuffer(ForgeActor):
    """Episodes or groups, bounded in number and in age.

    `add` waits while the buffer is full (back-pressure); `sample` waits until there is enough that is young enough.
    What is dropped is counted with its reason. A group with an unscored episode keeps the others if two remain.

    Args:
        capacity: most items held.
        max_policy_age: an item whose oldest token was sampled more than this many versions ago is dropped; None keeps
            any age.
        order: "fifo" or "random" (without replacement).
        seed: of the random order.
    """

    def __init__(
        self,
        capacity: int = 4096,
        *,
        max_policy_age: int | None = None,
        order: Literal["fifo", "random"] = "fifo",
        seed: int = 0,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        if max_policy_age is not None and max_policy_age < 0:
            raise ValueError(f"max_policy_age must be None or at least 0, got {max_policy_age}")
        if order not in ("fifo", "random"):
            raise ValueError(f"order must be fifo or random, got {order!r}")
        self.capacity, self.max_policy_age, self.order = capacity, max_policy_age, order
        self.items: list[Item] = []
        self.dropped = {"unscored": 0, "unscored_episodes": 0, "too_old": 0}
        self.random = random.Random(seed)
        self.version = 0
        self.changed = asyncio.Condition()

    @endpoint
    async def add(self, item: Item) -> bool:
        """Put one item in, waiting for room. Returns False if it was dropped: unscored, or too old already."""
        scored = _scored(item)
        if scored is None:
            self._drop("unscored", 1)
            return False
        if isinstance(item, Group) and isinstance(scored, Group) and len(scored.episodes) < len(item.episodes):
            self._drop("unscored_episodes", len(item.episodes) - len(scored.episodes))
        if not self._young(scored):
            self._drop("too_old", 1)
            return False
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.items) < self.capacity)
            self.items.append(scored)
            self.changed.notify_all()
        return True

    @endpoint
    async def sample(self, version: int, batch_size: int) -> list[Item]:
        """Take `batch_size` items to train `version`, waiting until they are there. Each item is taken once."""
        if batch_size > self.capacity:
            raise ValueError(f"a batch of {batch_size} can never be drawn from a buffer of {self.capacity}")
        await self.expire(version)
        async with self.changed:
            with phase("wait_for_batch"):
                await self.changed.wait_for(lambda: len(self.items) >= batch_size)
            if self.order == "random":
                self.random.shuffle(self.items)
            taken, self.items = self.items[:batch_size], self.items[batch_size:]
            self.changed.notify_all()
        record_metric("buffer/size", len(self.items))
        return taken

    @endpoint
    async def expire(self, version: int) -> int:
        """Drop what is too old to train `version`, now and from here on; returns how many items that were."""
        async with self.changed:
            self.version = max(self.version, version)
            young = [item for item in self.items if self._young(item)]
            expired = len(self.items) - len(young)
            if expired:
                self._drop("too_old", expired)
                self.items = young
                self.changed.notify_all()
        return expired

    @endpoint
    async def counts(self) -> dict[str, int]:
        """Items held, and items dropped since the start by reason."""
        return {"size": len(self.items), **self.dropped}

    @endpoint
    async def state_dict(self) -> dict[str, Any]:
        """Everything held, the counters and the random state."""
        return copy.deepcopy(
            {"items": self.items, "dropped": self.dropped, "version": self.version, "random": self.random.getstate()}
        )

    @endpoint
    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved state in place of the current one."""
        async with self.changed:
            self.items, self.dropped = list(state["items"]), dict(state["dropped"])
            self.version = state["version"]
            self.random.setstate(state["random"])
            self.changed.notify_all()

    def _young(self, item: Item) -> bool:
        # Version -1 says that nobody knows who sampled it: age cannot be judged, the trainer takes it as on-policy.
        return self.max_policy_age is None or item.version == -1 or item.version >= self.version - self.max_policy_age

    def _drop(self, reason: str, number: int) -> None:
        self.dropped[reason] += number
        record_metric(f"dropped/{reason}", number, Reduce.SUM)


def _scored(item: Item) -> Item | None:
    if isinstance(item, Episode):
        return item if item.reward is not None else None
    episodes = [episode for episode in item.episodes if episode.reward is not None]
    if len(episodes) < min(2, len(item.episodes)):
        return None
    return Group(episodes, item.index, item.target)
