"""Lost replicas are replaced and their calls answered elsewhere; what cannot be saved is an error that says so."""

import asyncio
import os
import signal

import pytest

from forge.runtime.controller import CallTimeout, PoisonRequest, ReplicaDied, Unrecoverable, run
from tests.runtime.controller.components import Counter, Replayed

pytestmark = pytest.mark.processes


async def until(condition, seconds=20.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def states(service):
    return [replica.state for replica in service.status().replicas]


@pytest.mark.parametrize(
    "fault", ["kill", *(pytest.param(fault, marks=pytest.mark.full) for fault in ("stop", "loop"))]
)
async def test_calls_on_lost_replica_are_retried_on_another(fault, tmp_path):
    flag = tmp_path / "flag"
    flag.touch()

    service = await Counter.options(num_replicas=2).as_service()
    pids = [replica.pids[0] for replica in service.status().replicas]
    bystanders = [asyncio.create_task(service.overlap.route(1.0)) for _ in range(6)]
    answered_by = await service.once.route(fault, flag)
    assert len(await asyncio.gather(*bystanders)) == 6
    await until(lambda: states(service) == ["up", "up"])
    status = service.status()
    assert status.restarts == 1
    assert status.retried >= 1
    now = [replica.pids[0] for replica in status.replicas]
    assert len(set(pids) & set(now)) == 1
    assert answered_by in now
    assert [replica.restarts for replica in status.replicas].count(1) == 1
    assert len({place for place, _ in await service.where.fanout()}) == 2


async def test_request_that_kills_two_replicas_is_quarantined():
    service = await Counter.options(num_replicas=3).as_service()
    innocent = [asyncio.create_task(service.overlap.route(2.0)) for _ in range(9)]
    await asyncio.sleep(0.2)
    with pytest.raises(PoisonRequest, match=r"counter\.exit \(request counter-.*, from test_.* 2 replicas died"):
        await service.exit.route()
    assert len(await asyncio.gather(*innocent)) == 9
    await until(lambda: states(service) == ["up"] * 3)
    status = service.status()
    assert status.restarts == 2
    assert status.retried >= 2
    assert [what.partition(" ")[0] for what in status.quarantined] == ["counter.exit"]


async def test_replica_killed_externally_does_not_quarantine_request():
    service = await Counter.options(num_replicas=2).as_service()
    asked = asyncio.create_task(service.overlap.route(4.0))
    for retries in (1, 2):
        await asyncio.sleep(1.5)  # longer than a request takes that ends its process
        (serving,) = [replica for replica in service.status().replicas if replica.in_flight]
        os.kill(serving.pids[0], signal.SIGKILL)
        await until(lambda retries=retries: service.status().retried == retries)
    await asked
    assert service.status().quarantined == []


async def test_lost_rank_replaces_all_ranks_of_replica():
    service = await Counter.options(procs=2).as_actor()
    before = service.status().replicas[0].pids
    os.kill(before[1], signal.SIGKILL)
    await asyncio.sleep(0.2)
    assert await service.add.call(1) == [1, 1]
    assert not set(before) & set(service.status().replicas[0].pids)


async def test_peer_rank_error_after_rank_death_retries_call(tmp_path):
    service = await Counter.options(procs=2).as_actor()
    (tmp_path / "flag").touch()
    assert await service.lose_a_peer.call(tmp_path / "flag") == [0, 1]
    assert service.status().replicas[0].restarts == 1


async def test_replacement_replica_replays_missed_updates_before_serving(tmp_path):
    service = await Replayed.options(num_replicas=2).as_service(str(tmp_path))
    assert await service.update.fanout(1) == [1, 1]
    lost = service.status().replicas[1].pids[0]
    os.kill(lost, signal.SIGKILL)
    await until(lambda: states(service)[1] == "restarting")
    assert await service.update.fanout(2) == [2]  # does not wait for the one that is away
    await until(lambda: states(service) == ["up", "up"])
    version, calls, pid = (await service.state.fanout())[1]
    assert (version, calls) == (2, ["setup", "on_respawn 1", "update 2"])
    assert pid != lost
    await service.scale(3)
    assert (await service.state.fanout())[2][:2] == (2, ["setup", "update 2"])


def test_failed_replacement_replica_setup_is_retried(tmp_path, capfd):
    async def main():
        service = await Replayed.options(num_replicas=1).as_service(str(tmp_path))
        (tmp_path / "broken").write_text("2")
        os.kill(service.status().replicas[0].pids[0], signal.SIGKILL)
        await asyncio.sleep(0.1)
        assert (await service.state.route())[1] == ["setup", "on_respawn 1"]

    run(main())
    assert capfd.readouterr().err.count("could not be replaced (RuntimeError: the disk is on fire)") == 2


@pytest.mark.full
def test_replica_that_cannot_be_replaced_ends_run_with_reason(tmp_path):
    async def main():
        service = await Replayed.options(max_restarts=2).as_service(str(tmp_path))
        (tmp_path / "broken").write_text("100")
        os.kill(service.status().replicas[0].pids[0], signal.SIGKILL)
        await asyncio.sleep(0.1)
        await service.state.route()

    with pytest.raises(ReplicaDied, match=r"no replica of replayed is left\. the disk is on fire"):
        run(main())


def test_component_with_unrecoverable_state_ends_run(tmp_path):
    async def main():
        service = await Replayed.as_actor(str(tmp_path))
        (tmp_path / "hopeless").touch()
        os.kill(service.status().replicas[0].pids[0], signal.SIGKILL)
        await asyncio.sleep(60)

    with pytest.raises(ReplicaDied, match="nothing was saved") as caught:
        run(main())
    assert isinstance(caught.value.__cause__, Unrecoverable)


async def test_repeated_request_id_is_executed_again_without_restart():
    service = await Counter.as_actor()
    twin = service.overlap.options(request_id="twin")
    assert await asyncio.gather(twin.route(0.3), twin.route(0.3)) == [2, 2]
    assert service.status().restarts == 0


async def test_failed_fanout_is_not_replayed_on_replacement(tmp_path):
    service = await Replayed.as_actor(str(tmp_path))
    await service.update.fanout(3)
    with pytest.raises(ValueError, match="no such version"):
        await service.update.fanout(-1)
    os.kill(service.status().replicas[0].pids[0], signal.SIGKILL)
    await asyncio.sleep(0.1)
    assert (await service.state.route())[0] == 3


async def test_hung_sync_endpoint_is_restarted_after_call_timeout():
    service = await Counter.options(call_timeout=1.0).as_actor()
    with pytest.raises(CallTimeout, match="loop_in_thread gave no answer within 1 s"):
        await service.loop_in_thread.route()
    assert await service.add.options(timeout=20).route(1) == 1
    assert "ran past call_timeout" in service.status().replicas[0].error


async def test_exceeded_memory_limit_raises_memory_error():
    service = await Counter.options(memory_gb=1.0).as_actor()
    with pytest.raises(MemoryError):
        await service.hoard.route(4.0)
    assert await service.add.route(1) == 1
    assert service.status().restarts == 0
