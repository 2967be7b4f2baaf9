"""A buffer and a policy that follow the schedule of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forge.actors.replay_buffer import Item, ReplayBuffer
from forge.observability.schedule import GroupEntry
from forge.runtime.controller import ForgeError, endpoint
from forge.types import Completion, Group, Spans
from forge_envs.rollout import turn_seeds


class ReplayDiffers(ForgeError):
    """A difference of a replay from its schedule: names the step, and what differs in it."""


class ScheduledBuffer(ReplayBuffer):
    """A replay buffer whose batches, and what it drops, are those of a schedule.

    Args:
        batches: indices of the groups of each step, in their order.
        reasons: why groups were dropped, by index.
    """

    def __init__(self, batches: Mapping[int, Sequence[int]], reasons: Mapping[int, str], **settings: Any) -> None:
        super().__init__(capacity=1 << 30, **settings)
        self.batches = batches
        self.reasons = reasons

    @endpoint
    async def sample(self, version: int, batch_size: int) -> list[Any]:
        """Return the groups with which the run trained `version`, in its order."""
        # Step n trains version n - 1.
        indices = self.batches[version + 1]
        async with self.changed:
            await self.changed.wait_for(lambda: {*indices} <= {group.index for group in self.groups})
            groups = {group.index: group for group in self.groups}
            self.items = [group for group in self.groups if group.index not in indices]
        return [groups[index] for index in indices]

    @property
    def groups(self) -> list[Group]:
        """The items: a run has groups alone."""
        return [item for item in self.items if isinstance(item, Group)]

    def _unfit(self, item: Item) -> str | None:
        assert isinstance(item, Group)
        reason = self.reasons.get(item.index)
        if reason is None and not any(episode.reward is not None for episode in item.episodes):
            raise ReplayDiffers(f"prompt {item.index} was trained on, and now none of its answers can be scored")
        return reason


class ScheduledPolicy:
    """A policy for one group, whose tokens are drawn by the weights that drew them in the run.

    Args:
        policy: the generators.
        group: its entries.
        seed: of the group.
    """

    def __init__(self, policy: Any, group: GroupEntry, seed: int, samples: int) -> None:
        self.policy = policy
        self.group = group
        self.generate = self
        self.drawn = dict.fromkeys(range(samples), 0)  # tokens of complete requests, by sample
        self.seeds: dict[int, int] = {}  # of the request that runs, by sample
        self._turns = {number: turn_seeds(seed, number, 0) for number in self.drawn}
        self._numbers = {next(turns): number for number, turns in self._turns.items()}

    def left(self, number: int) -> Spans:
        """The spans of a sample that are still to be drawn."""
        entry = self.group.samples.get(number)
        skipped = self.drawn[number]
        spans: list[tuple[int, int]] = []
        for version, count in entry.spans if entry else ():
            rest = count - min(count, skipped)
            skipped -= count - rest
            if rest:
                spans.append((version, rest))
        return tuple(spans)

    def is_held(self, version: int, held_seeds: set[int]) -> bool:
        """Whether all that these weights draw was drawn, or is beyond what its request can draw with them."""
        for number in self.drawn:
            spans = self.left(number)
            if spans and spans[0][0] <= version and self.seeds.get(number) not in held_seeds:
                return False
        return True

    async def route(self, prompt: Any, n: int | None = None, *, seed: int, **sampling: Any) -> Any:
        """`Generator.generate` by the schedule: all samples of the group, or the next turn of one."""
        # A reward without an environment asks for all samples at once, an episode for its next turn.
        numbers = [self._number(seed)] if n is None else [*range(n)]
        schedule = tuple(map(self.left, numbers))
        if all(schedule):  # of a changed run, tokens may be beyond it
            sampling["schedule"] = schedule
        self.seeds |= dict.fromkeys(numbers, seed)
        answers: Completion | list[Completion] = await self.policy.generate.route(prompt, n=n, seed=seed, **sampling)
        completions = [answers] if isinstance(answers, Completion) else answers
        for number, completion in zip(numbers, completions, strict=True):
            self.drawn[number] += len(completion.token_ids)
            del self.seeds[number]
        return answers

    def _number(self, seed: int) -> int:
        """The sample whose next turn has this seed."""
        if seed not in self._numbers:
            raise ReplayDiffers(
                f"an episode of prompt {self.group.index} was begun once more: its environment failed, which it did "
                "not in the run"
            )
        number = self._numbers.pop(seed)
        self._numbers[next(self._turns[number])] = number
        return number
