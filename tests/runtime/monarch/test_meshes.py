"""Services on meshes that a user made with Monarch: placement, faults, and what stays the user's."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from monarch.actor import HostMesh, ProcMesh, this_host
from monarch.job import LocalJob, ProcessJob
from tokenizers import Tokenizer
from tokenizers.models import BPE

from forge.observability.metrics import PROCESS_NAME
from forge.runtime.controller import (
    ForgeActor,
    ReplicaDied,
    ServiceConfig,
    Unrecoverable,
    endpoint,
    run,
)
from forge.runtime.controller.user_meshes import UserPlacement
from forge.runtime.process_groups import process_store
from tests.runtime.controller.components import Counter, Joined
from tests.runtime.controller.test_endings import alive, gone_within
from tests.runtime.controller.test_recovery import states, until
from tests.runtime.monarch.components import Mailbox, Plain

pytestmark = pytest.mark.processes


@asynccontextmanager
async def procs_of(count: int) -> AsyncIterator[ProcMesh]:
    """Processes of a user, who stops them."""
    mesh = this_host().spawn_procs({"gpus": count})
    await mesh.initialized
    try:
        yield mesh
    finally:
        await mesh.stop()


def run_within(seconds: float, main: Callable[[], Coroutine]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(seconds):
            await main()

    run(limited())


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@pytest.mark.full
def test_user_process_mesh_runs_service_and_outlives_shutdown():
    async def main() -> None:
        async with procs_of(4) as mesh:
            plain = mesh.spawn("plain", Plain)
            ranks = await Counter.options(hosts=mesh).as_actor(start=1)
            names = await ranks.where.call()
            assert [name for name, _ in names] == [f"counter[0] rank {rank}" for rank in range(4)]
            pids = [pid for _, pid in names]
            assert len({*pids, os.getpid()}) == 5
            assert await ranks.environment.call(PROCESS_NAME) == ["counter0"] * 4  # in traces
            # Two replicas of two ranks in the same processes, next to the actor above and to Monarch's own.
            pairs = await Joined.options(hosts=mesh, num_replicas=2).as_service()
            assert await pairs.sum_of_ranks.fanout() == [3.0, 3.0]
            assert [sorted(row.pids) for row in pairs.status().replicas] == [sorted(pids[:2]), sorted(pids[2:])]
            assert await plain.slice(gpus=3).add.call_one(2) == 2
            await pairs.stop()
            assert await ranks.add.call(1) == [2] * 4
            await ranks.stop()
            assert alive(pids) == pids
            # The processes are free for another service, of slices of them.
            singles = await Counter.options(hosts=mesh.slice(gpus=slice(2, 4)), num_replicas=2).as_service()
            assert [pid for _, pid in await singles.where.fanout()] == pids[2:]
            await singles.stop()
            assert await plain.slice(gpus=3).add.call_one(2) == 4
        assert gone_within(pids, 20)

    run_within(100, main)


@pytest.mark.full
def test_lost_process_of_user_mesh_raises_one_line_error(capfd: pytest.CaptureFixture):
    async def main() -> None:
        async with procs_of(2) as mesh:
            service = await Counter.options(hosts=mesh, num_replicas=2).as_service()
            first, second = [pid for _, pid in await service.where.fanout()]
            os.kill(second, signal.SIGKILL)
            await until(lambda: states(service) == ["up", "failed"])
            assert {pid for _, pid in [await service.where.route() for _ in range(4)]} == {first}
            assert "ran in your ProcMesh" in service.status().replicas[1].error
            # Growing again needs the lost process.
            with pytest.raises(Unrecoverable, match=r"counter\[1\] ran in your ProcMesh"):
                await service.scale(2)
            assert await service.add.route(1) == 1
            os.kill(first, signal.SIGKILL)
            with pytest.raises(ReplicaDied, match=r"no replica of counter is left.*your ProcMesh"):
                await service.add.route(1)

    with pytest.raises(ReplicaDied, match="no replica of counter is left"):
        run_within(100, main)
    lines = [line for line in capfd.readouterr().err.splitlines() if "given up" in line]
    assert lines == [
        f"forge: counter[{index}] is given up: counter[{index}] ran in your ProcMesh, whose processes forge cannot "
        "restart: start the run again, or pass a HostMesh as hosts, where lost processes are replaced"
        for index in (1, 0)
    ]


class Parser(ForgeActor):
    """Uses a class of an extension that was imported above."""

    vital = False

    def setup(self) -> None:
        self.tokenizer = Tokenizer(BPE())

    @endpoint
    def size(self) -> int:
        return self.tokenizer.get_vocab_size()

    @endpoint
    async def wait(self) -> None:
        await asyncio.sleep(600)


@pytest.mark.full
def test_component_error_keeps_processes_of_user_mesh_alive():
    async def main() -> None:
        # It ends with this program: `stop` would wait for the actor that Monarch is still to start in a dead process.
        mesh = this_host().spawn_procs({"gpus": 2})
        for _ in range(2):
            with pytest.raises(ValueError, match="cannot start below zero"):
                await Counter.options(hosts=mesh).as_actor(start=-1)
        parser = await Parser.options(hosts=mesh).as_actor()
        assert await parser.size.call() == [0, 0]
        # A call in flight ends with its process, and does not wait for the other rank.
        waiting = asyncio.create_task(parser.wait.call())
        await until(lambda: parser.status().replicas[0].in_flight == 1)
        os.kill(parser.status().replicas[0].pids[1], signal.SIGKILL)
        with pytest.raises(ReplicaDied, match=r"no replica of parser is left.*your ProcMesh"):
            await waiting

    run_within(100, main)


@pytest.mark.full
def test_replicas_fill_monarch_job_hosts_and_are_replaced_there():
    async def main() -> None:
        job = ProcessJob({"counter": 2, "joined": 2, "spare": 1})
        state = job.state(cached_path=None)
        try:
            workers = [row.pid for row in job._host_to_pid.values()]
            counters = await Counter.options(hosts=state, num_replicas=3).as_service()
            pids = [pid for _, pid in await counters.where.fanout()]
            assert [parent_of(pid) for pid in pids] == [workers[0], workers[1], workers[0]]
            # One replica of two ranks, on two hosts; then one of a mesh by another name.
            joined = await Joined.options(hosts=state, procs=2).as_actor()
            assert await joined.sum_of_ranks.call() == [3.0, 3.0]
            assert {parent_of(pid) for pid in joined.status().replicas[0].pids} == {*workers[2:4]}
            spare = await Mailbox.options(hosts=state, mesh_name="spare").as_actor()
            assert await spare.put.call_one("hello") == 1
            os.kill(pids[1], signal.SIGKILL)
            await until(lambda: states(counters) == ["up"] * 3 and counters.status().restarts == 1)
            replaced = (await counters.where.fanout())[1][1]
            assert replaced != pids[1]
            assert parent_of(replaced) == workers[1]
            await asyncio.gather(counters.stop(), joined.stop(), spare.stop())
            assert gone_within([*pids, replaced], 20)
            assert alive(workers) == workers  # hosts are the user's
        finally:
            job.kill()

    run_within(120, main)


def test_services_on_monarch_local_job_run_on_controller_host():
    async def main() -> None:
        options = ServiceConfig(hosts=LocalJob(["trainers"]).state(cached_path=None), num_replicas=2)
        service = await Counter.options(options).as_service()
        pids = [pid for _, pid in await service.where.fanout()]
        os.kill(pids[0], signal.SIGKILL)
        await until(lambda: states(service) == ["up", "up"] and service.status().restarts == 1)
        alone = await Counter.options(hosts=this_host(), env={"FLAG": "set"}).as_actor()
        assert await alone.environment.call_one("FLAG") == "set"

    run_within(100, main)


def test_ranks_on_another_machine_raise_one_line_error(tmp_path: Path):
    with pytest.raises(
        ConnectionError, match=r"^the ranks of this process group meet in .*/gone, a directory of the contr"
    ):
        process_store(str(tmp_path / "gone" / "ranks-1"), 2)


async def place_gpus(mesh: HostMesh) -> list[dict[str, list[str]]]:
    """The devices of four replicas on a mesh, after one of them was released and replaced."""
    placement = UserPlacement()
    placed = [await placement.place("a", index, mesh, 2, 3, 2) for index in range(3)]
    placement.release("a", 2)
    placed[2] = await placement.place("b", 0, mesh, 4, 1, 1)
    assert await placement.place("b", 0, mesh, 4, 1, 1) is placed[2]
    return [hosts.gpus() for hosts in placed]


def test_services_on_one_mesh_get_different_devices():
    job = ProcessJob({"hosts": 2})
    try:
        mesh = job.state(cached_path=None).hosts
        # Replicas of two processes with two devices each, in turn; one of four processes, two on each host.
        assert asyncio.run(place_gpus(mesh)) == [
            {"": ["0", "1", "2", "3"]},
            {"": ["0", "1", "2", "3"]},
            {"": ["4", "5"]},
        ]
    finally:
        job.kill()
