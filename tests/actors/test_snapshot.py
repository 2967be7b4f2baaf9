"""A run that is killed and resumed from any snapshot trains every prompt once, on time, and counts what it drops."""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from forge.actors.contents import Contents, Seen
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.actors import DatasetActor, Window
from forge.controller import ActorContext
from forge.data.dataset import PromptDataset
from forge.data.tokenizer import character_tokenizer
from forge.types import Group
from tests.actors.respawn import request
from tests.actors.test_replay_buffer import episode

TOKENIZER = character_tokenizer()
TASK = {"task": "apps.toys.words:Reverse", "difficulty": [2, 3], "prompt_template": "{question}>"}


def dataset(incarnation: int = 0, **settings: Any) -> DatasetActor:
    """A dataset with its tokenizer at hand."""
    actor = DatasetActor("", **settings)
    actor.context = ActorContext("DatasetActor", incarnation=incarnation)
    actor.ledger.begin()
    actor.dataset = PromptDataset(tokenizer=TOKENIZER, **TASK)
    if incarnation:
        actor.on_respawn()
    return actor


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=60))
def test_seen_is_a_set(indices: list[int]):
    seen, plain = Seen(), set()
    for index in indices:
        seen.add(index)
        plain.add(index)
        assert {i for i in range(-1, 40) if i in seen and i >= 0} == plain
        assert seen.low == next(i for i in range(40) if i not in plain)
        assert all(i > seen.low for i in seen.above)


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
        self.buffer = Contents(self.age, self.order, 0)
        self.step = held = 0
        if self.saved is not None:
            self.step, buffer, data = copy.deepcopy(self.saved)
            forgotten = self.dataset.load_state_dict(data, buffer["seen"])
            self.buffer.load_state_dict(buffer)
            self.buffer.forget(forgotten)
            held = len(self.buffer.items)
        self.version = self.step
        self.window = Window(self.batch, self.age, self.steps, self.version, held)
        self.flying: list[tuple[int, int]] = []
        del self.trained[self.step :]

    async def launch(self) -> bool:
        if not self.window._open():
            return False
        await self.window.admit()
        self.flying.append((self.dataset.sample().prompt.index, self.version))
        return True

    async def land(self, which: int, scored: bool = True) -> None:
        if self.flying and len(self.buffer.items) < 2 * self.batch * (self.age + 1):
            index, version = self.flying.pop(which % len(self.flying))
            if not self.buffer.add(Group([episode(0, version, 1.0 if scored else None)], index)):
                await self.window.refund(1)

    async def train(self) -> bool:
        await self.window.refund(self.buffer.expire(self.step))
        if self.step == self.steps or len(self.buffer.items) < self.batch:
            return False
        groups = self.buffer.take(self.batch)
        assert all(0 <= self.step - group.version <= self.age for group in groups)
        self.trained.append([group.index for group in groups])
        self.step += 1
        if self.step % self.sync == 0 or self.step == self.steps:
            self.version = self.step
            await self.window.advance(self.step)
        return True

    async def snapshot(self, landing: int) -> None:
        buffer = copy.deepcopy(self.buffer.state_dict())
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
        assert self.window.admitted == self.step * self.batch + len(self.buffer.items) + len(self.flying)


moves = st.one_of(
    st.tuples(st.just("launch"), st.integers(1, 8)),
    st.tuples(st.just("land"), st.integers(0, 8)),
    st.tuples(st.just("unscored"), st.integers(0, 8)),
    st.tuples(st.just("train"), st.integers(1, 2)),
    st.tuples(st.just("snapshot"), st.integers(0, 3)),
    st.tuples(st.just("kill"), st.just(0)),
)


@settings(max_examples=300, deadline=None)
@given(
    history=st.lists(moves, max_size=60),
    batch=st.integers(1, 4),
    age=st.sampled_from([0, 1, 4]),
    sync=st.integers(1, 4),
    order=st.sampled_from(["fifo", "random"]),
    remember=st.sampled_from([None, 0, 2]),
)
def test_kills_and_resumes(history: list, batch: int, age: int, sync: int, order: Any, remember: int | None):
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
            world.check()
        while world.step < world.steps:
            moved = await world.launch()
            while world.flying and len(world.buffer.items) < 2 * batch * (age + 1):
                await world.land(0)
            moved |= await world.train()
            assert moved or world.window._open(), "the run stands still"
            world.check()
        assert [len(step) for step in world.trained] == [batch] * world.steps
        assert not world.window._open()

    asyncio.run(main())


def test_what_was_under_way_is_handed_out_again_and_first():
    first = dataset()
    drawn = [first.sample() for _ in range(5)]
    seen = Seen(1, {3})
    second = dataset()
    assert second.load_state_dict(copy.deepcopy(first.state_dict()), seen) == []
    assert [second.sample() for _ in range(4)] == [drawn[1], drawn[2], drawn[4], first.sample()]
    third = dataset()
    assert third.load_state_dict(second.state_dict(), seen) == []
    assert [third.sample() for _ in range(3)] == [drawn[1], drawn[2], drawn[4]]


def test_what_is_no_longer_remembered_is_said():
    first = dataset(remember=2)
    drawn = [first.sample() for _ in range(5)]
    second = dataset(remember=2)
    assert second.load_state_dict(first.state_dict(), Seen(1, {3})) == [1, 2]
    assert second.sample() == drawn[4]
    assert second.sample() == first.sample()


def test_without_word_of_what_was_seen_the_stream_goes_on():
    first = dataset()
    for _ in range(3):
        first.sample()
    second = dataset()
    assert second.load_state_dict(first.state_dict()) == []
    assert second.sample() == first.sample()


@pytest.mark.parametrize("floor", [0, 1 << 20])
def test_a_dataset_that_is_killed_after_a_resume(tmp_path: Path, floor: int):
    """Whatever is to be handed out again is handed out once, and is remembered for the next snapshot."""
    earlier, calm = dataset(), dataset()
    for _ in range(4):
        earlier.sample()
    state, seen = earlier.state_dict(), Seen(0, {2})
    calm.load_state_dict(copy.deepcopy(state), seen)

    def make(incarnation: int) -> DatasetActor:
        actor = dataset(incarnation, journal=str(tmp_path / "journal"))
        actor.ledger.FLOOR = floor  # type: ignore[misc]
        return actor

    hit = make(0)
    with request("load"):
        hit.load_state_dict(copy.deepcopy(state), seen)
        hit = make(1)
        assert hit.load_state_dict(copy.deepcopy(state), seen) == []
    for number in range(2, 8):
        with request(str(number)):
            expected = calm.sample()
            assert hit.sample() == expected
            hit = make(number)
            assert hit.sample() == expected
        assert hit.state_dict() == calm.state_dict()


def test_a_group_that_comes_again_is_dropped_and_counted():
    contents = Contents(None, "fifo", 0)
    group = Group([episode(0), episode(1)], 4)
    assert contents.add(group)
    contents.take(1)
    assert not contents.admits(group)
    assert not contents.add(group)
    assert contents.dropped["repeated"] == 1
    assert all(contents.add(Group([episode(0), episode(1)])) for _ in range(2))  # without an index
