"""A run that is killed and resumed from any snapshot trains every prompt once, on time, and counts what it drops."""

import asyncio
import copy
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, strategies as st

from forge.actors import DatasetActor, ReplayBuffer
from forge.data.prompts import PromptDataset
from forge.models.tokenizer import character_tokenizer
from forge.runtime.controller import ActorContext, Unrecoverable
from forge.types import Group, Seen
from tests.actors.test_replay_buffer import episode

TOKENIZER = character_tokenizer()
TASK = {"task": "apps.toys.words:Reverse", "difficulty": [2, 3], "prompt_template": "{question}>"}


def dataset(**settings: Any) -> DatasetActor:
    """A dataset with its tokenizer at hand."""
    actor = DatasetActor("x", **TASK, **settings)
    actor.dataset = PromptDataset(tokenizer=TOKENIZER, **TASK)
    return actor


class World:
    """The recipe's two loops, one move at a time, with real parts in one process."""

    def __init__(self, batch: int, age: int, steps: int, sync: int, order: Any, remember: int | None) -> None:
        self.batch, self.age, self.steps, self.sync, self.order = batch, age, steps, sync, order
        self.remember = 1 << 16 if remember is None else remember
        self.trained: list[list[int]] = []
        self.saved: tuple[int, dict[str, Any], dict[str, Any]] | None = None
        self.begin()

    def begin(self) -> None:
        self.dataset = dataset(remember=self.remember)
        self.step = 0 if self.saved is None else self.saved[0]
        self.buffer = ReplayBuffer(
            2 * self.batch * (self.age + 1),
            max_policy_age=self.age,
            order=self.order,
            batch_size=self.batch,
            steps=self.steps,
            start=self.step,
        )
        self.version = self.step
        self.flying: list[tuple[int, int]] = []
        del self.trained[self.step :]

    async def restore(self) -> None:
        if self.saved is not None:
            _, buffer, data = copy.deepcopy(self.saved)
            forgotten = self.dataset.load_state_dict(data, buffer["seen"])
            await self.buffer.load_state_dict(buffer, forgotten)

    async def launch(self) -> bool:
        if not self.open():
            return False
        await self.buffer.admit()
        self.flying.append((self.dataset.sample().prompt.index, self.version))
        return True

    def open(self) -> bool:
        return self.buffer._admits_rollout()

    async def land(self, which: int, scored: bool = True) -> None:
        if self.flying and len(self.buffer.items) < self.buffer.capacity:
            index, version = self.flying.pop(which % len(self.flying))
            await self.buffer.add(Group([episode(0, version, 1.0 if scored else None)], index))

    async def train(self) -> bool:
        await self.buffer.expire(self.step)
        if self.step == self.steps or len(self.buffer.items) < self.batch:
            return False
        groups = await self.buffer.sample(self.step, self.batch)
        assert all(0 <= self.step - group.version <= self.age for group in groups)
        self.trained.append([group.index for group in groups])
        self.step += 1
        if self.step % self.sync == 0 or self.step == self.steps:
            self.version = self.step
            await self.buffer.advance(self.step)
        return True

    async def snapshot(self, landing: int) -> None:
        buffer = copy.deepcopy(await self.buffer.state_dict())
        for _ in range(landing):  # while the two states are taken
            await self.land(0)
            await self.launch()
        self.saved = self.step, buffer, copy.deepcopy(self.dataset.state_dict())

    def check(self) -> None:
        """Nothing twice, nothing lost."""
        assert len(self.trained) == self.step
        there = [index for step in self.trained for index in step]
        there += [group.index for group in self.buffer.items] + [index for index, _ in self.flying]
        assert max(Counter(there).values(), default=1) == 1
        waiting = {sample.prompt.index for sample in self.dataset.again}
        gone = set(range(self.dataset.dataset.served)) - set(there) - waiting
        dropped = self.buffer.dropped
        assert len(gone) == dropped["unscored"] + dropped["too_old"] + dropped["forgotten"]
        assert dropped["repeated"] == 0
        assert self.buffer.admitted == self.step * self.batch + len(self.buffer.items) + len(self.flying)


moves = st.one_of(
    st.tuples(st.just("launch"), st.integers(1, 8)),
    st.tuples(st.just("land"), st.integers(0, 8)),
    st.tuples(st.just("unscored"), st.integers(0, 8)),
    st.tuples(st.just("train"), st.integers(1, 2)),
    st.tuples(st.just("snapshot"), st.integers(0, 3)),
    st.tuples(st.just("kill"), st.just(0)),
)


@given(
    history=st.lists(moves, max_size=60),
    batch=st.integers(1, 4),
    age=st.sampled_from([0, 1, 4]),
    sync=st.integers(1, 4),
    order=st.sampled_from(["fifo", "random"]),
    remember=st.sampled_from([None, 0, 2]),
)
def test_each_step_trains_a_full_batch_after_process_kills(
    history: list, batch: int, age: int, sync: int, order: Any, remember: int | None
):
    async def main() -> None:
        world = World(batch, age, 6, min(sync, age + 1), order, remember)
        for move, number in history:
            match move:
                case "launch":
                    for _ in range(number):
                        await world.launch()
                case "land" | "unscored":
                    await world.land(number, scored=move == "land")
                case "train":
                    for _ in range(number):
                        await world.train()
                case "snapshot":
                    await world.snapshot(number)
                case "kill":
                    world.begin()
                    await world.restore()
            world.check()
        while world.step < world.steps:
            moved = await world.launch()
            while world.flying and len(world.buffer.items) < 2 * batch * (age + 1):
                await world.land(0)
            moved |= await world.train()
            assert moved or world.open(), "the run stands still"
            world.check()
        assert [len(step) for step in world.trained] == [batch] * world.steps
        assert not world.open()

    asyncio.run(main())


def test_resumed_dataset_replays_samples_in_flight_first():
    first = dataset()
    drawn = [first.sample() for _ in range(5)]
    seen = Seen(1, {3})
    second = dataset()
    assert second.load_state_dict(copy.deepcopy(first.state_dict()), seen) == []
    assert [second.sample() for _ in range(4)] == [drawn[1], drawn[2], drawn[4], first.sample()]
    third = dataset()
    assert third.load_state_dict(second.state_dict(), seen) == []
    assert [third.sample() for _ in range(3)] == [drawn[1], drawn[2], drawn[4]]


@pytest.mark.parametrize("component", [DatasetActor("x", [{"question": "q", "answer": "a"}]), ReplayBuffer()])
def test_lost_dataset_service_ends_run_with_hint_to_resume(component: Any):
    component.context = ActorContext(type(component).__name__, incarnation=1)
    with pytest.raises(Unrecoverable, match="resume the run from its last checkpoint"):
        component.on_respawn()


async def test_repeated_group_index_is_dropped_and_counted():
    buffer = ReplayBuffer()
    group = Group([episode(0), episode(1)], 4)
    assert await buffer.add(group)
    await buffer.sample(0, 1)
    assert not await buffer.add(group)
    assert (await buffer.counts())["repeated"] == 1
    for _ in range(2):
        assert await buffer.add(Group([episode(0), episode(1)]))  # without an index


@given(
    batch_size=st.integers(1, 5), age=st.integers(0, 4), steps=st.integers(1, 8), seed=st.randoms(use_true_random=False)
)
def test_rollout_policy_age_is_bounded_without_extra_rollouts(batch_size: int, age: int, steps: int, seed: Any):
    async def main() -> None:
        buffer = ReplayBuffer(batch_size=batch_size, max_policy_age=age, steps=steps)
        started: list[int] = []  # the version served when each rollout started

        async def rollouts() -> None:
            while True:
                await buffer.admit()
                started.append(buffer.served)

        task = asyncio.create_task(rollouts())
        for version in range(steps):
            for _ in range(seed.randint(1, 3)):
                await asyncio.sleep(0)
            while len(started) < (version + 1) * batch_size:
                await asyncio.sleep(0)
            await buffer.advance(version + 1)
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        assert len(started) == steps * batch_size
        for number, version in enumerate(started):
            assert number // batch_size - version <= age
            assert age or number // batch_size == version

    asyncio.run(main())
