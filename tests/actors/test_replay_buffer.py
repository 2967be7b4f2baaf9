"""The replay buffer: nothing lost, nothing twice, nothing too old, and back-pressure."""

import asyncio

import pytest
from hypothesis import given, strategies as st

from forge.actors import ReplayBuffer
from forge.types import Episode, Group


def episode(name: int, version: int = 0, reward: float | None = 1.0) -> Episode:
    return Episode(prompt_ids=[1], response_ids=[name], reward=reward, logprobs=[-0.1], versions=[version])


def name(item: Episode) -> int:
    return item.tokens[-1]


@given(
    versions=st.lists(st.integers(0, 6), min_size=1, max_size=30),
    age=st.integers(0, 3),
    order=st.sampled_from(["fifo", "random"]),
    batch=st.integers(1, 4),
)
def test_replay_buffer_items_are_sampled_once_or_counted_as_dropped(versions, age, order, batch):
    async def main():
        buffer = ReplayBuffer(100, max_policy_age=age, order=order, seed=1)
        for i, version in enumerate(versions):
            assert await buffer.add(episode(i, version))
        taken = []
        for version in range(7):
            await buffer.expire(version)
            while (await buffer.counts())["size"] >= batch:
                got = await buffer.sample(version, batch)
                assert len(got) == batch
                assert all(item.version >= version - age for item in got)
                taken += [name(item) for item in got]
        counts = await buffer.counts()
        assert len(taken) == len(set(taken))
        assert len(taken) + counts["size"] + counts["too_old"] == len(versions)

    asyncio.run(main())


async def test_full_replay_buffer_blocks_add_and_empty_blocks_sample():
    buffer = ReplayBuffer(2)
    waiting = asyncio.create_task(buffer.sample(0, 2))
    await buffer.add(episode(0))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await buffer.add(episode(1))
    assert [name(item) for item in await waiting] == [0, 1]
    for i in (2, 3):
        await buffer.add(episode(i))
    blocked = asyncio.create_task(buffer.add(episode(4)))
    await asyncio.sleep(0.01)
    assert not blocked.done()
    await buffer.sample(0, 1)
    assert await asyncio.wait_for(blocked, 20)


async def test_groups_beyond_max_policy_age_are_dropped_and_counted():
    buffer = ReplayBuffer(10, max_policy_age=1)
    for version in (0, 0, 1, 2):
        assert await buffer.add(episode(version, version))
    assert await buffer.expire(2) == 2
    assert not await buffer.add(episode(9, version=0))
    assert await buffer.expire(2) == 0
    counts = await buffer.counts()
    assert {reason: number for reason, number in counts.items() if number} == {"size": 2, "too_old": 3}


async def test_unscored_episodes_are_dropped_and_counted():
    buffer = ReplayBuffer(10)
    assert not await buffer.add(episode(0, reward=None))
    assert not await buffer.add(Group([episode(1), episode(2, reward=None)]))
    assert await buffer.add(Group([episode(3), episode(4, reward=None), episode(5, reward=0.0)], index=7))
    (group,) = await buffer.sample(0, 1)
    assert (group.rewards, group.index) == ([1.0, 0.0], 7)
    counts = await buffer.counts()
    assert (counts["unscored"], counts["unscored_episodes"]) == (2, 1)


async def test_restored_replay_buffer_returns_the_same_samples():
    first, second = ReplayBuffer(10, order="random"), ReplayBuffer(10, order="random", seed=9)
    for i in range(8):
        await first.add(episode(i))
    await second.load_state_dict(await first.state_dict())
    for _ in range(2):
        assert [name(i) for i in await first.sample(0, 4)] == [name(i) for i in await second.sample(0, 4)]


def test_replay_batch_larger_than_capacity_raises():
    with pytest.raises(ValueError, match="larger than the capacity"):
        asyncio.run(ReplayBuffer(3).sample(0, 4))
    with pytest.raises(ValueError, match="order must be"):
        ReplayBuffer(3, order="lifo")  # type: ignore[arg-type]


@pytest.mark.parametrize("age", [0, 1, 3])
async def test_max_policy_age_limits_rollouts_started_ahead_of_training(age: int):
    buffer = await ReplayBuffer.as_local(batch_size=2, max_policy_age=age, steps=age + 3)
    rollouts = [asyncio.create_task(buffer.admit.route()) for _ in range(2 * (age + 5))]

    async def admitted() -> int:
        for _ in range(200):  # turns of the event loop: no admission depends on time
            await asyncio.sleep(0)
        return sum(rollout.done() for rollout in rollouts)

    assert await admitted() == 2 * (age + 1)
    await buffer.advance.route(1)
    assert await admitted() == 2 * (age + 2)
    await buffer.advance.route(9)
    assert await admitted() == 2 * (age + 3)  # those of all steps, and no more
    for rollout in rollouts:
        rollout.cancel()


async def test_replay_buffer_without_advance_admits_by_newest_sampled_version():
    buffer = ReplayBuffer(batch_size=2, max_policy_age=1)
    for i in range(4):
        await buffer.admit()
        await buffer.add(episode(i, 0))
    blocked = asyncio.create_task(buffer.admit())
    await buffer.sample(0, 2)
    assert not blocked.done()
    await buffer.sample(1, 2)
    await asyncio.wait_for(blocked, 20)

    # Whoever tells the buffer which version is served decides.
    told = ReplayBuffer(batch_size=1, max_policy_age=0)
    await told.advance(0)
    await told.admit()
    await told.add(episode(0, -1))
    await told.sample(1, 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(told.admit(), 0.05)


async def test_replay_buffer_outcomes_prefer_correctness_over_reward():
    buffer = ReplayBuffer(keep_outcomes=True)
    judged = [episode(number) for number in range(3)]
    for item, correct in zip(judged, (False, True, None), strict=True):
        item.info["correct"] = correct
    await buffer.add(Group(judged, index=0))
    await buffer.add(Group([episode(3, reward=0.5)], index=1))  # of a loop that judges nothing
    assert await buffer.take_outcomes() == {0: [0.0, 1.0], 1: [0.5]}
