"""Services and actors in real processes: the verbs, placement, errors, metrics."""

import asyncio
import os

import pytest

from forge.runtime.controller import (
    CallTimeout,
    ForgeError,
    RemoteError,
    ServiceConfig,
    ServiceStopped,
    drain_metrics,
    run,
)
from tests.runtime.controller.components import Counter, FromMonarch, Joined, Odd

pytestmark = pytest.mark.processes


async def test_route_call_and_fanout_reach_expected_replicas():
    service, actor = await asyncio.gather(
        Counter.options(num_replicas=2).as_service(start=10), Counter.options(procs=2).as_actor()
    )
    places = await service.where.fanout()
    assert [name for name, _pid in places] == ["counter[0]", "counter[1]"]
    assert len({pid for _name, pid in places} | {os.getpid()}) == 3
    assert await service.add.route(1) == 11
    assert sorted(await service.add.fanout(0)) == [10, 11]
    ranks = await actor.where.call()
    assert [name for name, _pid in ranks] == ["counter2[0] rank 0", "counter2[0] rank 1"]
    assert await actor.add.route(5) == 5  # every rank counts, rank 0 answers
    assert await actor.add.call(0) == [5, 5]
    with pytest.raises(ForgeError, match=r"2 replicas: use route .* or fanout"):
        await service.where.call()
    with pytest.raises(ForgeError, match="call_one needs a component of one process"):
        await actor.where.call_one()
    with pytest.raises(AttributeError, match="no endpoint 'ad'; did you mean 'add'"):
        service.ad  # noqa: B018


def test_component_written_for_monarch_runs_as_service():
    async def main():
        service = await FromMonarch.options(ServiceConfig(num_replicas=2)).as_service()
        assert await service.add.fanout(2) == [3, 3]
        assert len({*await service.where.fanout(), os.getpid()}) == 3
        with pytest.raises(
            TypeError, match=r"from_monarch.add is an endpoint of another process: write `await .*\.route"
        ):
            service.add(1)
        with pytest.raises(AttributeError, match="no endpoint 'teardown'"):
            service.teardown  # noqa: B018
        await service.shutdown()
        with pytest.raises(ServiceStopped):
            await service.add.route(1)

    run(main())
    with pytest.raises(TypeError, match=r"Counter\.as_service: got an unexpected keyword argument 'begin'"):
        Counter.as_service(begin=3)


async def test_routing_balances_load_and_sessions_stay_on_replica():
    service = await Counter.options(num_replicas=2).as_service()
    await asyncio.gather(*(service.overlap.route(0.05) for _ in range(20)))
    assert [row.served for row in service.status().replicas] == [10, 10]
    async with service.session():
        assert len({(await service.where.route())[1] for _ in range(6)}) == 1
    async with service.session("mine"):
        first = await service.where.route()
    assert len({(await service.where.route())[1] for _ in range(6)}) == 2
    assert first[0].startswith("counter")
    # The busy replica is avoided.
    busy = asyncio.create_task(service.slow_add.route(1, 1.0))
    await asyncio.sleep(0.2)
    assert len({(await service.where.route())[1] for _ in range(6)}) == 1
    await busy


async def test_async_endpoints_run_concurrently_and_sync_endpoints_do_not():
    counter = await Counter.as_actor()
    assert max(await asyncio.gather(*(counter.overlap.route(0.3) for _ in range(4)))) > 1
    await asyncio.gather(*(counter.slow_add.route(1, 0.05) for _ in range(5)))
    assert await counter.add.route(0) == 5
    # A busy thread does not keep the component from answering elsewhere.
    busy = asyncio.create_task(counter.slow_add.route(1, 2.0))
    await asyncio.sleep(0.1)
    await counter.where.route()
    assert not busy.done()
    await busy


async def test_endpoint_exception_reaches_caller_with_traceback():
    counter = await Counter.as_actor()
    with pytest.raises(KeyError) as caught:
        await counter.fail.route("lost key")
    assert caught.value.args == ("lost key",)
    assert any("counter[0].fail" in note for note in caught.value.__notes__)
    assert "components.py" in str(caught.value.__cause__)  # the remote traceback
    with pytest.raises(RemoteError, match="Odd: ab"):
        await counter.fail_oddly.route()
    with pytest.raises(RemoteError, match="SystemExit: 0"):
        await counter.leave.route()
    assert Odd("a", "b").args == ("ab",)
    assert await counter.add.route(2) == 2


def test_component_setup_exception_reaches_caller():
    async def main():
        await Counter.as_actor(start=-1)

    with pytest.raises(ValueError, match="cannot start below zero"):
        run(main())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"procs": 0}, "procs must be at least 1"),
        ({"num_replicas": 0}, "num_replicas must be at least 1"),
        ({"call_timeout": 0}, "call_timeout must be above 0"),
        ({"share": "x", "procs": 2}, "must have procs 1"),
        ({"memory_gb": 0.1}, "memory_gb must be at least 0.25"),
        ({"env": {"A=B": "1"}}, "env: 'A=B' = '1' is not a valid environment variable"),
        ({"env": {"A": "a\0b"}}, r"env: 'A' = 'a\\x00b' is not a valid environment variable"),
    ],
)
def test_invalid_service_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        Counter.options(**options)


async def test_call_timeout_error_names_caller_and_endpoint():
    counter = await Counter.options(call_timeout=0.5).as_actor()
    with pytest.raises(CallTimeout, match=r"^test_.* \(test_service.*counter\[0\]\.overlap gave no answer within 0.5"):
        await counter.overlap.route(30)
    with pytest.raises(CallTimeout, match=r"within 0\.1"):
        await counter.overlap.options(timeout=0.1).route(30)
    assert await counter.add.options(timeout=20).route(1) == 1
    # The work was stopped there, and the replica is the one that it was.
    assert await counter.running_now.options(timeout=20).route() == 0
    assert counter.status().restarts == 0


@pytest.mark.usefixtures("fork_server")
async def test_ranks_of_service_replica_form_a_process_group():
    joined = await Joined.options(procs=2).as_actor()
    assert await joined.sum_of_ranks.call() == [3.0, 3.0]


@pytest.mark.usefixtures("fork_server")
async def test_failing_rank_fails_service_call_immediately():
    joined = await Joined.options(procs=2, call_timeout=60).as_actor()
    with pytest.raises(MemoryError, match="the last rank has no room"):
        await asyncio.wait_for(joined.fail_on_the_last_rank.call(), 20)


async def test_service_metrics_of_all_processes_merge():
    service = await Counter.options(num_replicas=2).as_service()
    for value in (1.0, 2.0, 6.0):
        await service.record.route(value)
    snapshot = await drain_metrics()
    values = snapshot.values()
    assert (values["value"], values["value/max"]) == (pytest.approx(3.0), 6.0)
    assert {span.name for span in snapshot.spans} == {"recording"}
    assert len({span.pid for span in snapshot.spans}) == 2
    assert "value" not in (await drain_metrics()).values()


async def test_call_to_stopped_service_raises():
    service = await Counter.as_actor()
    await service.stop()
    with pytest.raises(ServiceStopped, match="counter was stopped"):
        await service.add.route(1)
    await drain_metrics()
    await Counter.as_actor()
