"""The window: how far rollouts may run ahead, as a property of every schedule."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.actors import Window


@settings(max_examples=60, deadline=None)
@given(
    batch_size=st.integers(1, 5), age=st.integers(0, 4), steps=st.integers(1, 8), seed=st.randoms(use_true_random=False)
)
def test_no_rollout_is_older_than_allowed_and_none_is_surplus(batch_size, age, steps, seed):
    async def main():
        window = Window(batch_size, age, steps)
        started: list[tuple[int, int]] = []

        async def rollouts():
            while True:
                index = await window.admit()
                started.append((index, window.version))

        task = asyncio.create_task(rollouts())
        for version in range(steps):
            for _ in range(seed.randint(1, 3)):
                await asyncio.sleep(0)
            while len(started) < (version + 1) * batch_size:
                await asyncio.sleep(0)
            await window.advance(version + 1)
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        assert [index for index, _ in started] == list(range(steps * batch_size))
        for index, version in started:
            assert index // batch_size - version <= age
        if age == 0:
            assert all(index // batch_size == version for index, version in started)

    asyncio.run(main())


def test_a_refund_admits_as_many_again():
    async def main():
        window = Window(batch_size=2, max_policy_age=0, steps=1)
        assert [await window.admit() for _ in range(2)] == [0, 1]
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(window.admit(), 0.05)
        await window.refund(1)
        assert await asyncio.wait_for(window.admit(), 1) == 2

    asyncio.run(main())


def test_a_negative_age_is_refused():
    with pytest.raises(ValueError, match="at least 0"):
        Window(1, -1, 1)
