"""Simulated engines and services, against times that can be worked out by hand."""

import asyncio
from random import Random

import pytest

from forge.recipes.simulate.clock import run_virtually
from forge.recipes.simulate.engine import EngineLost, SimulatedEngine
from forge.recipes.simulate.services import Failures, GeneratorService, RewardServers
from forge.recipes.simulate.settings import Faults, Generators


def now() -> float:
    return asyncio.get_running_loop().time()


def test_rows_share_the_steps_of_an_engine():
    async def main() -> tuple[float, SimulatedEngine]:
        engine = SimulatedEngine(Generators(step_seconds=0.1, row_seconds=0.05), 3)
        assert await engine.generate([10, 20], 0) == [3, 3]
        return now(), engine

    seconds, engine = run_virtually(main())
    # Ten steps of two rows, then ten of one.
    assert seconds == pytest.approx(10 * 0.2 + 10 * 0.15)
    assert engine.tokens == pytest.approx(30)
    assert engine.busy == pytest.approx(3.5)
    assert engine.row_seconds == pytest.approx(2 * 2.0 + 1.5)


def test_samples_without_a_slot_wait_for_one():
    async def main() -> float:
        engine = SimulatedEngine(Generators(step_seconds=1.0, slots=2), 0)
        await engine.generate([5, 3, 4], 0)
        return now()

    assert run_virtually(main()) == pytest.approx(3 + 4)


def test_a_prompt_is_computed_once_for_its_group_while_decoding_waits():
    async def main() -> list[float]:
        engine = SimulatedEngine(Generators(step_seconds=1.0, token_seconds=0.01), 0)
        ends: list[float] = []

        async def group(start: float, length: int) -> None:
            await asyncio.sleep(start)
            await engine.generate([length] * 4, 100)
            ends.append(now())

        await asyncio.gather(group(0.0, 10), group(5.0, 10))
        return ends

    # The second group's prompt, at 5 s, delays the first one by a second, and it joins at the next step.
    assert run_virtually(main()) == [pytest.approx(12.0), pytest.approx(16.0)]


def test_a_row_that_comes_within_a_step_joins_the_next():
    async def main() -> float:
        engine = SimulatedEngine(Generators(step_seconds=1.0), 0)
        first = asyncio.ensure_future(engine.generate([10], 0))
        await asyncio.sleep(2.5)
        await engine.generate([2], 0)
        end = now()
        await first
        return end

    assert run_virtually(main()) == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("on_update", "updated", "ended"), [("continue", 3.0, 10.0), ("finish", 10.0, 10.0), ("recompute", 3.0, 10.13)]
)
def test_running_rows_at_an_update(on_update: str, updated: float, ended: float):
    async def main() -> tuple[float, float, list[int], list[int]]:
        settings = Generators(step_seconds=1.0, load_seconds=2.0, token_seconds=0.01, on_update=on_update)
        engine = SimulatedEngine(settings, 0)
        ends: dict[str, float] = {}

        async def group() -> list[int]:
            versions = await engine.generate([10], 0)
            ends["group"] = now()
            return versions

        running = asyncio.ensure_future(group())
        await asyncio.sleep(1.0)
        await engine.update_weights(1)
        ends["update"] = now()
        later = await engine.generate([1], 0)
        return ends["update"], ends.get("group") or await _end(running, ends), await running, later

    async def _end(running: asyncio.Future, ends: dict[str, float]) -> float:
        await running
        return ends["group"]

    update, end, versions, later = run_virtually(main())
    assert update == pytest.approx(updated)
    # Three tokens are computed again in recompute: .03 s.
    assert end == pytest.approx(ended if on_update != "recompute" else 10.03)
    assert versions == [0]
    assert later == [1]


def test_a_lost_engine_loses_what_it_generated():
    async def main() -> SimulatedEngine:
        engine = SimulatedEngine(Generators(step_seconds=1.0), 0)
        running = asyncio.ensure_future(engine.generate([2, 10], 0))
        await asyncio.sleep(5.0)
        engine.fail()
        with pytest.raises(EngineLost):
            await running
        return engine

    engine = run_virtually(main())
    assert engine.tokens == pytest.approx(2 + 5)
    assert engine.lost == pytest.approx(2 + 5)


def test_requests_of_a_lost_generator_go_to_another():
    async def main() -> tuple[float, list[int]]:
        service = GeneratorService(
            Generators(replicas=2, step_seconds=1.0), "least_loaded", Failures(Faults(), Random())
        )
        first = asyncio.ensure_future(service.generate([10], 0))
        second = asyncio.ensure_future(service.generate([10], 0))
        await asyncio.sleep(5.0)
        assert [replica.in_flight for replica in service.replicas] == [1, 1]
        lost = service.replicas[0]
        lost.alive = False
        service.balancer.leave(lost)
        lost.engine.fail()
        await asyncio.gather(first, second)
        return now(), [replica.served for replica in service.replicas]

    seconds, served = run_virtually(main())
    # A tenth of a second later it begins again, within a step of the other.
    assert seconds == pytest.approx(16.0)
    assert served == [0, 2]


def test_a_reward_server_is_a_queue_of_known_length():
    """M/D/1: Poisson arrivals at a server of constant time wait for load / (2 (1 - load)) of it on average."""
    load = 0.7
    service = 2.0
    count = 20_000

    async def main() -> float:
        servers = RewardServers(1)
        random = Random(1)
        waits: list[float] = []

        async def group() -> None:
            came = now()
            await servers.score(service)
            waits.append(now() - came - service)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                await asyncio.sleep(random.expovariate(load / service))
                tasks.create_task(group())
        assert servers.busy == pytest.approx(service * count)
        return sum(waits) / count

    assert run_virtually(main()) == pytest.approx(service * load / (2 * (1 - load)), rel=0.06)
