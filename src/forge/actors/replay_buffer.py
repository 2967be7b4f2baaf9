"""The replay buffer: finished rollouts wait in it for the trainer, and it limits how far ahead rollouts may start."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from ..config.arguments import check_whole
from ..observability import Reduce, phase, record_metric
from ..runtime.controller import ForgeActor, Unrecoverable, endpoint
from ..system.extras import find_foreign_name as __getattr__  # noqa: F401  (other names of torchforge)
from ..types import Episode, Group, Seen
from .staleness import Staleness

Item = Episode | Group
REASONS = ("unscored", "unscored_episodes", "no_signal", "too_old", "repeated", "forgotten")


class ReplayBuffer(ForgeActor):
    """Buffer of episodes or groups for the trainer, limited in number and policy age, which admits new rollouts.

    `add` waits while the buffer is full (back-pressure); `sample` waits until there are enough items that are fresh.
    Dropped items are counted by reason. Of a group with an unscored episode the other episodes are kept, if at least
    two remain. A group that has an index is accepted once in a run: one that comes again is dropped.

    With `batch_size` the buffer also admits rollouts: rollout i trains in step `i // batch_size`, and `admit` returns
    once version `i // batch_size - max_policy_age` is served by the generators. The loop reports the served version by
    `advance`; a loop that never does so calls `sample` when the weights that train next are published. A dropped item
    lets another rollout start. So one rollout loop is synchronous or asynchronous, as `max_policy_age` says.

    It lives in the controller (`as_local`) or in a separate process (`as_actor`), whose loss ends the run.

    Args:
        capacity: maximum number of items.
        max_policy_age: see `Staleness`; an older item is dropped.
        order: "fifo" or "random" (without replacement).
        seed: of the random order.
        replace: maximum number of groups between two `sample` calls that are dropped because their rewards are all
            equal (no signal). Others replace them; the limit ends the search if the policy solves everything, or
            nothing.
        batch_size: rollouts of one training step; None admits any number.
        steps: training steps of the run; no rollout beyond them is admitted. None admits all.
        start: the version that is served at the start.
        keep_dropped: maximum number of dropped groups that are kept for `take_dropped`, the first ones.
        keep_outcomes: whether the outcomes of groups are kept for `take_outcomes`.
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
        for name, optional, minimum in (
            ("batch_size", batch_size, 1),
            ("steps", steps, 0),
            ("max_policy_age", max_policy_age, 0),
        ):
            if optional is not None:
                check_whole(optional, name, minimum)

        if order not in ("fifo", "random"):
            raise ValueError(f"order must be fifo or random, got {order!r}")

        self.capacity, self.order, self.replace = capacity, order, replace
        self.batch_size, self.steps = batch_size, steps
        self.keep_dropped, self.keep_outcomes = keep_dropped, keep_outcomes
        self.staleness = Staleness(max_policy_age)

        self.served = start
        self.is_advanced = False  # whether `advance` was ever called
        self.admitted = start * (batch_size or 0)
        self.items: list[Item] = []
        self.dropped = dict.fromkeys(REASONS, 0)
        self.seen = Seen()
        self.outcomes: dict[int, list[float]] = {}  # of groups since `take_outcomes`
        self.random = random.Random(seed)
        self.version = 0  # the weights that train next: an item that is too old for them stays too old
        self.replaced = 0
        self.kept = list[tuple[str, Group]]()
        self.changed = asyncio.Condition()

    def on_respawn(self) -> None:
        """Raise Unrecoverable, because the buffered items were lost with the process."""
        raise Unrecoverable(
            f"{self.context} died and the groups in it are lost: resume the run from its last checkpoint"
        )

    @endpoint
    async def admit(self) -> None:
        """Wait until one more rollout may start; once the run needs no more, wait until the call is cancelled."""
        async with self.changed:
            await self.changed.wait_for(self._admits_rollout)
            self.admitted += 1

    @endpoint
    async def advance(self, version: int) -> None:
        """Set the version that the generators serve from now on, which may admit rollouts."""
        async with self.changed:
            self.served = version
            self.is_advanced = True
            self.changed.notify_all()

    @endpoint
    async def add(self, item: Item) -> bool:
        """Add one item once there is space for it; return False if it was dropped instead.

        Dropped are items that are unscored, repeated, without signal (see `replace`), or too old by then.
        """
        async with self.changed:
            while (reason := self._reason_to_drop(item)) is None and len(self.items) >= self.capacity:
                await self.changed.wait()

            index = _item_index(item)
            if index is not None and reason != "repeated":
                self.seen.add(index)
                # Also those of dropped groups: a prompt that all answers solve has no signal, but an outcome.
                if self.keep_outcomes:
                    # 1.0 for a right episode, 0.0 for a wrong one; the reward where `info` does not judge it.
                    episodes = getattr(item, "episodes", [item])
                    outcomes = (episode.info.get("correct", episode.outcome) for episode in episodes)
                    self.outcomes[index] = [float(outcome) for outcome in outcomes if outcome is not None]

            if reason is not None:
                self.replaced += reason == "no_signal"
                self._drop_items(reason, [item])
                return False

            # Of a group only the scored episodes are kept, and the others count as dropped, if they had a turn.
            scored = _keep_scored(item)
            if isinstance(item, Group) and isinstance(scored, Group):
                unscored = [i for i, e in enumerate(item.episodes) if e.reward is None and not e.had_no_turn]
                self._count_dropped("unscored_episodes", len(unscored))
                if unscored:
                    self._keep_dropped_item("unscored", _select_samples(item, unscored))

            self.items.append(scored)  # type: ignore[arg-type]
            self.changed.notify_all()
            return True

    @endpoint
    async def sample(self, version: int, batch_size: int) -> Any:
        """Wait for `batch_size` items that are fresh enough to train weight version `version`; remove and return them.

        Items that are too old for this version are dropped.

        Raises:
            ValueError: the batch is larger than the capacity.
        """
        if batch_size > self.capacity:
            raise ValueError(
                f"batch_size {batch_size} is larger than the capacity {self.capacity} of the replay buffer: lower it, "
                "or raise the capacity"
            )

        async with self.changed:
            self._drop_expired(version)

            # In a loop that never calls `advance`, the weights that train next are the served ones.
            if not self.is_advanced:
                self.served = max(self.served, version)
                self.changed.notify_all()

            with phase("wait_for_batch"):
                await self.changed.wait_for(lambda: len(self.items) >= batch_size)
            if self.order == "random":
                self.random.shuffle(self.items)
            batch, self.items = self.items[:batch_size], self.items[batch_size:]
            self.replaced = 0
            self.changed.notify_all()
        record_metric("buffer/size", len(self.items))
        return batch

    @endpoint
    async def expire(self, version: int) -> int:
        """Drop the items that are too old to train weight version `version`; return the number of dropped items."""
        async with self.changed:
            return self._drop_expired(version)

    @endpoint
    async def clear(self) -> None:
        """Drop all items with the reason "forgotten", and admit as many new rollouts."""
        async with self.changed:
            self._drop_items("forgotten", self.items)
            self.items = []

    @endpoint
    async def take_dropped(self) -> list[tuple[str, Group]]:
        """Return (reason, group) for the groups that were dropped since the last call, at most `keep_dropped`."""
        dropped, self.kept = self.kept, []
        return dropped

    @endpoint
    async def handled(self) -> Seen:
        """Return the indices of all groups that were ever added, kept or dropped."""
        return Seen(self.seen.low, set(self.seen.above))

    @endpoint
    async def take_outcomes(self) -> dict[int, list[float]]:
        """Return the outcomes of all groups that were added since the last call, kept or dropped, by their index: for
        each episode 1.0 if it is right, else 0.0 (see `forge.data.sampler`)."""
        outcomes, self.outcomes = self.outcomes, {}
        return outcomes

    @endpoint
    async def counts(self) -> dict[str, int]:
        """Return the number of items held, as "size", and the numbers of items dropped since the start, by reason."""
        return {"size": len(self.items), **self.dropped}

    @endpoint
    async def state_dict(self) -> dict[str, Any]:
        """Return the items, the counters and the random state, for `load_state_dict`."""
        return {
            "items": list(self.items),
            "dropped": dict(self.dropped),
            "version": self.version,
            "random": self.random.getstate(),
            "seen": Seen(self.seen.low, set(self.seen.above)),
            "replaced": self.replaced,
            "outcomes": dict(self.outcomes),
            # Their rollouts are in `seen`, and not repeated: after a resume nothing else could return them.
            "kept": list(self.kept),
        }

    @endpoint
    async def load_state_dict(self, state: dict[str, Any], forgotten: Sequence[int] = ()) -> int:
        """Replace the present state by a saved one, and return the number of items.

        Args:
            state: what `state_dict` returned.
            forgotten: indices of groups that can no longer be added: they count as dropped, with this reason.
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

    # Return whether one more rollout may start now.
    def _admits_rollout(self) -> bool:
        if self.batch_size is None:
            return True
        admitted_steps = self.staleness.admitted_steps(self.served)
        if self.steps is not None:
            admitted_steps = min(admitted_steps, self.steps)
        return self.admitted < self.batch_size * admitted_steps

    def _reason_to_drop(self, item: Item) -> str | None:
        """Return the reason, as named by the counters, for which `add` would drop an item now; None if `add` would keep
        the item."""
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

    # Drop the items that are too old to train the weights `version`, now and from now on; return their number.
    def _drop_expired(self, version: int) -> int:
        self.version = max(self.version, version)
        expired = [item for item in self.items if not self.staleness.fresh(item, self.version)]
        if expired:
            self.items = [item for item in self.items if self.staleness.fresh(item, self.version)]
            self._drop_items("too_old", expired)
        return len(expired)

    def _drop_items(self, reason: str, items: Sequence[Item]) -> None:
        """Count dropped items by reason, and admit as many new rollouts."""
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


def _keep_scored(item: Item) -> Item | None:
    """Return an item without its unscored episodes; None if it has no scored one, or too few of a policy.

    An advantage compares episodes of one policy: of each policy in a group two must remain, or one if it had only one.
    """
    if isinstance(item, Episode):
        return item if item.reward is not None else None
    if not isinstance(item, Group):
        return item  # an item of the caller's own class, which the caller has judged

    scored = [i for i, episode in enumerate(item.episodes) if episode.reward is not None]
    all_counts = Counter(episode.policy for episode in item.episodes)
    scored_counts = Counter(item.episodes[i].policy for i in scored)
    if any(scored_counts[policy] < min(2, count) for policy, count in all_counts.items()):
        return None
    return item if len(scored) == len(item.episodes) else _select_samples(item, scored)


def _select_samples(group: Group, samples: list[int]) -> Group:
    """Return a copy of a group with only the episodes at the given indices."""
    return replace(group, episodes=[group.episodes[i] for i in samples], samples=tuple(samples))
