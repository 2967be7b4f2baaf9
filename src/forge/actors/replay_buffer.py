"""The replay buffer: rollouts wait in it for the trainer, and it bounds how far they may run ahead."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from ..config.arguments import check_whole
from ..observability import Reduce, phase, record_metric
from ..runtime.controller import ForgeActor, Unrecoverable, endpoint
from ..types import Episode, Group, Seen
from .staleness import Staleness

Item = Episode | Group
REASONS = ("unscored", "unscored_episodes", "no_signal", "too_old", "repeated", "forgotten")


class ReplayBuffer(ForgeActor):
    """Episodes or groups, bounded in number and in age.

    `add` waits while the buffer is full (back-pressure); `sample` waits until there is enough that is fresh. What is
    dropped is counted with its reason. A group with an unscored episode keeps the others if two remain. A group that
    has an index is taken once in a run: one that comes again is dropped.

    With `batch_size` it also admits rollouts: number i trains in step `i // batch_size`, and `admit` returns once
    version `i // batch_size - max_policy_age` is served: of which `advance` tells, or else `sample`, which is called
    once the weights that train next are out. What is dropped is admitted again. This is what makes one rollout loop
    synchronous or asynchronous.

    It lives in the controller (`as_local`) or in a separate process (`as_actor`), whose loss ends the run.

    Args:
        capacity: most items held.
        max_policy_age: see `Staleness`; an older item is dropped.
        order: "fifo" or "random" (without replacement).
        seed: of the random order.
        replace: drop groups whose rewards are all equal, for others to come in their place, at most that many per
            `sample`: where a policy is right or wrong about everything, the search must end.
        batch_size: rollouts of one training step; None admits any number.
        steps: training steps of the run; no rollout beyond them is admitted.
        start: the version served at the start.
        keep_dropped: most dropped groups that are kept for `take_dropped`, the first of them.
        keep_outcomes: whether the rewards of groups are kept for `take_outcomes`.
    """

    constructor_checks = True

    def __init__(
        self,
        capacity: int = 4096,
        *,
        max_policy_age: int | None = None,
        order: Literal["fifo", "random"] = "fifo",
        seed: int = 0,
        replace: int = 0,
        batch_size: int | None = None,
        steps: int | None = None,
        start: int = 0,
        keep_dropped: int = 0,
        keep_outcomes: bool = False,
    ) -> None:
        check_whole(capacity, "capacity")
        for name, value in (("replace", replace), ("start", start), ("keep_dropped", keep_dropped)):
            check_whole(value, name, 0)
        for name, optional, least in (
            ("batch_size", batch_size, 1),
            ("steps", steps, 0),
            ("max_policy_age", max_policy_age, 0),
        ):
            if optional is not None:
                check_whole(optional, name, least)

        if order not in ("fifo", "random"):
            raise ValueError(f"order must be fifo or random, got {order!r}")
        self.capacity = capacity
        self.order = order
        self.replace = replace
        self.staleness = Staleness(max_policy_age)
        self.batch_size = batch_size
        self.steps = steps

        self.served = start
        self.told_served = False
        self.admitted = start * (batch_size or 0)
        self.items: list[Item] = []
        self.dropped = dict.fromkeys(REASONS, 0)
        self.seen = Seen()
        self.outcomes: dict[int, list[float]] = {}  # rewards of groups since `take_outcomes`
        self.random = random.Random(seed)
        self.version = 0  # the weights that train next: an item that is too old for them stays too old

        self.replaced = 0
        self.keep_dropped = keep_dropped
        self.keep_outcomes = keep_outcomes
        self.kept = list[tuple[str, Group]]()
        self.changed = asyncio.Condition()

    def on_respawn(self) -> None:
        """Unrecoverable: the items were lost with the process."""
        raise Unrecoverable(f"{self.context} was lost with the items it held: resume the run from its last checkpoint")

    @endpoint
    async def admit(self) -> None:
        """Wait until one more rollout may start; waits until it is cancelled once the run has all it needs."""
        async with self.changed:
            await self.changed.wait_for(self._admits_rollout)
            self.admitted += 1

    @endpoint
    async def advance(self, version: int) -> None:
        """The generators now serve `version`."""
        async with self.changed:
            self.served = version
            self.told_served = True
            self.changed.notify_all()

    @endpoint
    async def add(self, item: Item) -> bool:
        """Put one item in, waiting for room. Returns False if it was dropped: unscored, repeated, without signal, or
        too old by then."""
        async with self.changed:
            while (reason := self._reason_to_drop(item)) is None and len(self.items) >= self.capacity:
                await self.changed.wait()
            index = _item_index(item)
            if index is not None and reason != "repeated":
                self.seen.add(index)
                # With what is dropped as well: a prompt that is solved by all answers may have no signal.
                if self.keep_outcomes:
                    self.outcomes[index] = [reward for reward in _item_rewards(item) if reward is not None]

            if reason is not None:
                self.replaced += reason == "no_signal"
                self._drop_items(reason, [item])
                return False

            scored = _keep_scored(item)
            assert scored is not None
            if isinstance(item, Group) and isinstance(scored, Group):
                numbers = range(len(item.episodes))
                lost = [i for i in numbers if item.episodes[i].reward is None and not item.episodes[i].had_no_turn]
                self._count_dropped("unscored_episodes", len(lost))
                if lost:
                    self._keep_dropped_item("unscored", _select_samples(item, lost))

            self.items.append(scored)
            self.changed.notify_all()
            return True

    @endpoint
    async def sample(self, version: int, batch_size: int) -> Any:
        """Take `batch_size` items to train `version`, waiting until they are there. Each item is taken once.

        ValueError: the batch is larger than the capacity.
        """
        if batch_size > self.capacity:
            raise ValueError(f"a batch of {batch_size} can never be drawn from a buffer of {self.capacity}")
        async with self.changed:
            self._drop_expired(version)
            if not self.told_served:
                self.served = max(self.served, version)
                self.changed.notify_all()
            with phase("wait_for_batch"):
                await self.changed.wait_for(lambda: len(self.items) >= batch_size)
            if self.order == "random":
                self.random.shuffle(self.items)
            batch = self.items[:batch_size]
            self.items = self.items[batch_size:]
            self.replaced = 0
            self.changed.notify_all()
        record_metric("buffer/size", len(self.items))
        return batch

    @endpoint
    async def expire(self, version: int) -> int:
        """Drop the items that are too old to train `version`; returns their number."""
        async with self.changed:
            return self._drop_expired(version)

    @endpoint
    async def clear(self) -> None:
        """Drop all items; they count as forgotten."""
        # Rollouts are admitted in their place, and callers of `add` that wait for room go ahead.
        async with self.changed:
            self._drop_items("forgotten", self.items)
            self.items = []

    @endpoint
    async def take_dropped(self) -> list[tuple[str, Group]]:
        """Return groups that were dropped since the last call, each with its reason; at most `keep_dropped`."""
        dropped = self.kept
        self.kept = []
        return dropped

    @endpoint
    async def handled(self) -> Seen:
        """Return the indices of all groups that ever came in, kept or not."""
        return Seen(self.seen.low, set(self.seen.above))

    @endpoint
    async def take_outcomes(self) -> dict[int, list[float]]:
        """Return the rewards of all groups that came in since the last call, kept or not, by index."""
        outcomes = self.outcomes
        self.outcomes = {}
        return outcomes

    @endpoint
    async def counts(self) -> dict[str, int]:
        """Return items held, and items dropped since the start by reason."""
        return {"size": len(self.items), **self.dropped}

    @endpoint
    async def state_dict(self) -> dict[str, Any]:
        """Return everything held, the counters and the random state."""
        return {
            "items": list(self.items),
            "dropped": dict(self.dropped),
            "version": self.version,
            "random": self.random.getstate(),
            "seen": Seen(self.seen.low, set(self.seen.above)),
            "replaced": self.replaced,
            "outcomes": dict(self.outcomes),
            # They are in `seen`: nothing else would record them after a resume.
            "kept": list(self.kept),
        }

    @endpoint
    async def load_state_dict(self, state: dict[str, Any], forgotten: Sequence[int] = ()) -> int:
        """Restore a saved state instead of the current one; returns how many items it holds.

        Args:
            forgotten: indices of groups that can no longer come in, counted as dropped.
        """
        async with self.changed:
            self.items = list(state["items"])
            self.dropped = dict(state["dropped"])
            self.version = state["version"]
            self.replaced = state["replaced"]
            self.outcomes = dict(state["outcomes"])
            self.kept = list(state["kept"])
            self.random.setstate(state["random"])
            self.seen = Seen(state["seen"].low, set(state["seen"].above))
            self.admitted = self.served * (self.batch_size or 0) + len(self.items)
            for index in forgotten:
                self.seen.add(index)
                self._count_dropped("forgotten")
            self.changed.notify_all()
            return len(self.items)

    def _admits_rollout(self) -> bool:
        if self.batch_size is None:
            return True
        steps = self.staleness.admitted_steps(self.served)
        return self.admitted < self.batch_size * (steps if self.steps is None else min(steps, self.steps))

    def _reason_to_drop(self, item: Item) -> str | None:
        """Return the reason for which `add` would drop an item now; None if it would keep it."""
        index = _item_index(item)
        scored = _keep_scored(item)
        if index is not None and index in self.seen:
            return "repeated"
        if scored is None:
            return "unscored"
        if not self.staleness.fresh(scored, self.version):
            return "too_old"
        if self.replaced < self.replace and isinstance(scored, Group) and not scored.has_signal:
            return "no_signal"
        return None

    def _drop_expired(self, version: int) -> int:
        self.version = max(self.version, version)
        expired = [item for item in self.items if not self.staleness.fresh(item, self.version)]
        if expired:
            self.items = [item for item in self.items if self.staleness.fresh(item, self.version)]
            self._drop_items("too_old", expired)
        return len(expired)

    def _drop_items(self, reason: str, items: Sequence[Item]) -> None:
        """Count items that are dropped, and admit rollouts in their place."""
        self.admitted -= len(items)
        self._count_dropped(reason, len(items))
        for item in items:
            self._keep_dropped_item(reason, item)
        self.changed.notify_all()

    def _keep_dropped_item(self, reason: str, item: Item) -> None:
        if len(self.kept) < self.keep_dropped and isinstance(item, Group):
            self.kept.append((reason, item))

    def _count_dropped(self, reason: str, number: int = 1) -> None:
        if number:
            self.dropped[reason] += number
            record_metric(f"dropped/{reason}", number, Reduce.SUM)


def _item_index(item: Item) -> int | None:
    return item.index if isinstance(item, Group) and item.index >= 0 else None


def _item_rewards(item: Item) -> list[float | None]:
    return [episode.outcome for episode in item.episodes] if isinstance(item, Group) else [item.outcome]


def _keep_scored(item: Item) -> Item | None:
    """Return the item with its scored episodes only; None if too few remain of a policy."""
    if isinstance(item, Episode):
        return item if item.reward is not None else None
    if not isinstance(item, Group):
        return item  # of the caller's own class, who judges it
    scored = [i for i, episode in enumerate(item.episodes) if episode.reward is not None]
    all_counts = Counter(episode.policy for episode in item.episodes)
    counts = Counter(item.episodes[i].policy for i in scored)
    if any(counts[policy] < min(2, count) for policy, count in all_counts.items()):
        return None
    return item if len(scored) == len(item.episodes) else _select_samples(item, scored)


def _select_samples(group: Group, samples: list[int]) -> Group:
    """Return some episodes of a group, by their numbers."""
    return replace(group, episodes=[group.episodes[i] for i in samples], samples=tuple(samples))
