"""Virtual time."""

import asyncio

import pytest

from forge.recipes.simulate.clock import NothingLeft, run_virtually


def test_sleeps_end_in_order_at_their_virtual_times():
    ends: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        ends.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        await asyncio.gather(sleeper("a year", 365 * 86400.0), sleeper("second", 1.0), sleeper("hour", 3600.0))

    run_virtually(main())
    assert ends[:2] == [("second", 1.0), ("hour", 3600.0)]
    assert ends[2] == ("a year", pytest.approx(365 * 86400.0))


def test_a_timeout_is_virtual():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1e6):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == pytest.approx(1e6)


def test_waiting_for_nothing_is_an_error():
    async def main() -> None:
        await asyncio.sleep(2.0)
        await asyncio.Event().wait()

    with pytest.raises(NothingLeft, match="at 2 s everything waits"):
        run_virtually(main())
