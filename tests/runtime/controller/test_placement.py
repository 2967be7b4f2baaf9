"""Services that grow, shrink, call one another, live on several hosts, and say how they are."""

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest

from forge.observability import Reduce
from forge.runtime.controller import CallTimeout, drain_metrics, run
from tests.runtime.controller.components import Caller, Counter
from tests.runtime.controller.test_endings import alive, gone_within
from tests.runtime.controller.test_recovery import states, until

pytestmark = pytest.mark.processes


def pids_of(service):
    return [pid for replica in service.status().replicas for pid in replica.pids]


async def test_scaling_a_busy_service_loses_no_call():
    service = await Counter.as_service(5)
    working = [asyncio.create_task(service.overlap.route(1.0)) for _ in range(4)]
    await service.scale(3)
    assert sorted(place for place, _ in await service.where.fanout()) == [f"counter[{i}]" for i in range(3)]
    working += [asyncio.create_task(service.overlap.route(1.0)) for _ in range(6)]
    await asyncio.sleep(0.2)
    removed = pids_of(service)[1:]
    await service.scale(1)  # lets them finish what they have begun
    assert len(await asyncio.gather(*working)) == 10
    assert len(service.status().replicas) == 1
    assert service.status().retried == 0
    assert gone_within(removed, 10)
    with pytest.raises(ValueError, match="at least one replica"):
        await service.scale(0)


@pytest.mark.full
async def test_failed_service_scaling_keeps_existing_replicas():
    class Once(Counter):
        def setup(self) -> None:
            if self.context.replica > 0:
                raise OSError("only one licence")

    service = await Once.as_service()
    with pytest.raises(OSError, match="only one licence"):
        await service.scale(3)
    assert states(service) == ["up"]
    assert await service.add.route(1) == 1


async def test_failed_service_start_leaves_no_process():
    before = set(children())
    with pytest.raises(ValueError, match="below zero"):
        await Counter.options(num_replicas=2).as_service(-1)
    await until(lambda: set(children()) <= before, 10)


def test_finished_controller_leaves_no_process():
    before = set(children())

    async def main():
        await asyncio.gather(
            Counter.options(num_replicas=2).as_service(),
            Counter.options(share="helpers").as_actor(),
            Counter.options(hosts=1).as_actor(),
        )
        return [pid for pid in children() if pid not in before]

    started = run(main())
    assert len(started) >= 4
    assert gone_within(started, 0.5)


def children() -> list[int]:
    """The processes that this one started, without the shell that removes its temporary files."""
    lists = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [int(pid) for each in lists for pid in each.read_text().split()]
    return [pid for pid in alive(pids) if Path(f"/proc/{pid}/comm").read_text().strip() != "sh"]


async def test_service_status_reports_load_and_latency():
    service = await Counter.options(num_replicas=2, mesh_name="tally", max_in_flight=1).as_service()
    calls = [asyncio.create_task(service.overlap.route(2.0)) for _ in range(5)]
    await until(lambda: service.status().queued == 3)
    status = service.status()
    assert status.name == "tally"
    assert [replica.in_flight for replica in status.replicas] == [1, 1]
    assert status.queued == 3
    await asyncio.gather(*calls)
    status = service.status()
    assert status.queued == 0
    assert sum(replica.served for replica in status.replicas) == 5
    assert all(2000 <= replica.latency_p50 <= replica.latency_p99 < 30_000 for replica in status.replicas)
    assert [replica.name for replica in status.replicas] == ["tally[0]", "tally[1]"]


@pytest.mark.full
async def test_named_sessions_move_when_the_assigned_replica_dies():
    service = await Counter.options(num_replicas=3).as_service()
    mine = service.where.options(session="mine")
    (home,) = {await mine.route() for _ in range(6)}
    os.kill(home[1], signal.SIGKILL)
    await until(lambda: "restarting" in states(service))
    (moved,) = {await mine.route() for _ in range(6)}
    assert moved != home


@pytest.mark.full
async def test_components_sharing_processes_are_replaced_together():
    options = {"share": "device", "share_procs": 2}
    ranks, replicas, light = await asyncio.gather(
        Counter.options(procs=2, **options).as_actor(),
        Counter.options(num_replicas=2, **options).as_service(),
        Counter.options(**options).as_actor(),
    )
    pids = [pid for _, pid in await ranks.where.call()]
    assert len({*pids}) == 2
    assert [pid for _, pid in await replicas.where.fanout()] == pids
    assert (await light.where.call_one())[1] == pids[0]
    await replicas.record.fanout(1.0)
    assert (await drain_metrics()).moments["value", Reduce.MEAN].count == 2
    os.kill(pids[1], signal.SIGKILL)
    assert await asyncio.to_thread(gone_within, pids, 10)
    again = [pid for _, pid in await ranks.where.call()]
    assert not {*again} & {*pids}
    assert [pid for _, pid in await replicas.where.fanout()] == again


async def test_service_is_callable_from_another_actor():
    counter = await Counter.options(num_replicas=2).as_service()
    caller = await Caller.as_service(counter)
    assert await caller.add_through.route(3) == 3
    assert len(set(await caller.places.route(5))) == 1
    assert len(await caller.everyone.route()) == 2
    with pytest.raises(KeyError, match="far away") as caught:
        await caller.fail_through.route()
    assert any("counter" in note and "fail" in note for note in caught.value.__notes__)
    with pytest.raises(CallTimeout, match=r"impatient \(components.py:\d+\) timed out: counter"):
        await caller.impatient.route()
    assert caller.status().restarts == 0
    # A call from there is saved as one from here is.
    os.kill(pids_of(counter)[0], signal.SIGKILL)
    assert len(await asyncio.gather(*(caller.add_through.route(0) for _ in range(8)))) == 8
    # A caller that goes away takes its call with it.
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(caller.wait_through.route(30), 0.5)
    await until(lambda: not any(replica.in_flight for replica in counter.status().replicas), 5)


def test_watchdog_reports_stalled_service_calls(capfd):
    async def main():
        service = await Counter.options(stall_after=1.0).as_actor()
        await service.slow_add.route(1, 3.5)

    run(main())
    told = capfd.readouterr().err
    assert "no answer from counter[0] for " in told
    assert "main (test_placement.py:" in told
    assert "waits for counter[0].slow_add since" in told
    assert re.search(r"slow_add \(.*components.py:\d+\)", told)  # the stack, as py-spy shows it
