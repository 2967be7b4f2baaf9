"""What a replay buffer holds, and the rules by which items come and go."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..types import Episode, Group

Item = Episode | Group


@dataclass
class Seen:
    """Indices of a stream, nearly all of them from 0 on: all below `low`, and those `above`."""

    low: int = 0
    above: set[int] = field(default_factory=set)

    def __contains__(self, index: int) -> bool:
        return index < self.low or index in self.above

    def add(self, index: int) -> None:
        if index not in self:
            self.above.add(index)
        while self.low in self.above:
            self.above.remove(self.low)
            self.low += 1


class Contents:
    """Items in order, counters and a random state: no waiting, no messages, no metrics.

    `seen` are the indices of all groups that ever came in, kept or not. A group that comes again is dropped, and so are
    groups whose rewards are all equal as they come, up to `replace` of them between two times that something is taken.

    The same operations in the same order give the same answers and leave the same contents. A journal of operations
    relies on that.
    """

    def __init__(
        self, max_policy_age: int | None, order: Literal["fifo", "random"], seed: int, replace: int = 0
    ) -> None:
        self.max_policy_age, self.order, self.replace = max_policy_age, order, replace
        self.replaced = 0
        self.items: list[Item] = []
        reasons = ("unscored", "unscored_episodes", "no_signal", "too_old", "repeated", "forgotten")
        self.dropped = dict.fromkeys(reasons, 0)
        self.seen = Seen()
        self.random = random.Random(seed)
        self.version = 0

    def admits(self, item: Item) -> bool:
        """Whether `add` would keep something of this item now."""
        scored = _scored(item)
        index = _index(item)
        if scored is None or not self._young(scored) or self._teaches_nothing(scored):
            return False
        return index is None or index not in self.seen

    def add(self, item: Item) -> bool:
        """Keep what is scored of an item; False and counted if it is dropped."""
        index = _index(item)
        if index is not None:
            if index in self.seen:
                self.dropped["repeated"] += 1
                return False
            self.seen.add(index)
        scored = _scored(item)
        if scored is None:
            self.dropped["unscored"] += 1
            return False
        if isinstance(item, Group) and isinstance(scored, Group):
            self.dropped["unscored_episodes"] += len(item.episodes) - len(scored.episodes)
        if not self._young(scored):
            self.dropped["too_old"] += 1
            return False
        if self._teaches_nothing(scored):
            self.dropped["no_signal"] += 1
            self.replaced += 1
            return False
        self.items.append(scored)
        return True

    def take(self, number: int) -> list[Item]:
        """Remove and return this many items in the buffer's order; there must be as many."""
        if self.order == "random":
            self.random.shuffle(self.items)
        taken, self.items = self.items[:number], self.items[number:]
        self.replaced = 0
        return taken

    def expire(self, version: int) -> int:
        """Drop what is too old to train `version`, now and from here on; how many items that were."""
        self.version = max(self.version, version)
        young = [item for item in self.items if self._young(item)]
        expired = len(self.items) - len(young)
        self.dropped["too_old"] += expired
        self.items = young
        return expired

    def state_dict(self) -> dict[str, Any]:
        """Everything, not copied."""
        return {
            "items": self.items,
            "dropped": self.dropped,
            "version": self.version,
            "random": self.random.getstate(),
            "seen": self.seen,
            "replaced": self.replaced,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state in place of the current one."""
        self.items, self.dropped = list(state["items"]), dict(state["dropped"])
        self.version = state["version"]
        self.random.setstate(state["random"])
        self.seen = Seen(state["seen"].low, set(state["seen"].above))
        self.replaced = state["replaced"]

    def forget(self, indices: Iterable[int]) -> None:
        """Count groups that never come in: nobody knows their prompts any more."""
        for index in indices:
            self.seen.add(index)
            self.dropped["forgotten"] += 1

    def _teaches_nothing(self, item: Item) -> bool:
        return self.replaced < self.replace and isinstance(item, Group) and len(set(item.rewards)) == 1

    def _young(self, item: Item) -> bool:
        # Version -1 says that nobody knows who sampled it: age cannot be judged, the trainer takes it as on-policy.
        return self.max_policy_age is None or item.version == -1 or item.version >= self.version - self.max_policy_age


def _index(item: Item) -> int | None:
    return item.index if isinstance(item, Group) and item.index >= 0 else None


def _scored(item: Item) -> Item | None:
    if isinstance(item, Episode):
        return item if item.reward is not None else None
    episodes = [episode for episode in item.episodes if episode.reward is not None]
    if len(episodes) < min(2, len(item.episodes)):
        return None
    return replace(item, episodes=episodes)
