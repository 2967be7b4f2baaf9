"""Services on meshes that a user made with Monarch: placement, faults, and what stays the user's."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import ClassVar

import pytest
from monarch.actor import Actor, HostMesh, ProcMesh, this_host
from monarch.actor import endpoint as monarch_endpoint
from monarch.job import LocalJob, ProcessJob
from tokenizers import Tokenizer
from tokenizers.models import BPE

from forge.config import ConfigError
from forge.observability.metrics import PROCESS_NAME
from forge.runtime.controller import (
    ForgeActor,
    ForgeError,
    Options,
    ReplicaDied,
    ServiceConfig,
    Unrecoverable,
    endpoint,
    run,
)
from forge.runtime.controller.actor_host import ActorHost
from forge.runtime.controller.user_meshes import UserPlacement
from forge.runtime.monarch_names import reload_config_from_env
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


class Slow(Actor):
    """An actor that takes CPU time to be made, as one does whose modules are imported for the first time."""

    def __init__(self, seconds: float) -> None:
        start = time.process_time()
        while time.process_time() - start < seconds:
            sum(range(10**8))  # without a moment for other threads of the process

    @monarch_endpoint
    def ready(self) -> bool:
        return True


def run_within(seconds: float, main: Callable[[], Coroutine]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(seconds):
            await main()

    run(limited())


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rsplit(")", 1)[1].split()[1])


def test_another_actor_that_is_made_in_the_same_process_is_no_hang():
    async def main() -> None:
        async with procs_of(1) as mesh:
            counter = await Counter.options(hosts=mesh, ping_timeout=1.0).as_actor(start=1)
            (pid,) = [pid for _, pid in await counter.where.call()]
            slow = mesh.spawn("slow", Slow, 4.0)
            assert await slow.ready.call_one()
            assert await counter.add.call(1) == [2]
            assert [pid for _, pid in await counter.where.call()] == [pid]
            await counter.stop()

    run_within(100, main)


def test_processes_of_a_user_serve_and_outlive_the_service():
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


def test_a_users_actor_may_import_forge_while_ours_is_made():
    program = f"""
import pickle, sys, threading, time

def pause(event, details):  # in the middle of the user's import, until the other thread waits for it
    if event == "exec" and details[0].co_filename.endswith("/controller/actor.py") and other.ident is None:
        other.start()
        while sys._current_frames()[other.ident].f_code.co_name != "acquire":
            time.sleep(0.01)

classes = []
other = threading.Thread(target=lambda: classes.append(pickle.loads({pickle.dumps(ActorHost)!r})))
sys.addaudithook(pause)
from forge.runtime.controller import ForgeActor
other.join()
print(classes[0].__name__)
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (finished.stdout, finished.returncode) == ("ActorHost\n", 0), finished.stderr


class Lone(ForgeActor):
    """Counts the components of its kind that live in its process, and the calls that run at once."""

    counts: ClassVar = {"components": 0, "calls": 0}
    largest: ClassVar = 0

    def setup(self) -> None:
        self.add("components", 1)

    def teardown(self) -> None:
        self.add("components", -1)

    def add(self, what: str, number: int) -> None:
        Lone.counts[what] += number
        Lone.largest = max(Lone.largest, *Lone.counts.values())

    @endpoint
    def work(self, seconds: float) -> None:
        self.add("calls", 1)
        time.sleep(seconds)
        self.add("calls", -1)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def most(self) -> int:
        return Lone.largest


@pytest.fixture
def impatient_monarch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Monarch gives up an actor after a pause of 2 s instead of 60 s."""
    with monkeypatch.context() as patch:
        for state in ("ACTOR", "PROC"):
            patch.setenv(f"HYPERACTOR_MESH_GET_{state}_STATE_MAX_IDLE", "2s")
        reload_config_from_env()
        yield
    reload_config_from_env()


@pytest.mark.usefixtures("impatient_monarch")
def test_processes_that_live_serve_again_though_monarch_gave_up_the_actor():
    async def main() -> None:
        async with procs_of(2) as mesh:
            ranks = await Lone.options(hosts=mesh, ping_timeout=24.0).as_actor()
            pids = await ranks.pid.call()
            working = asyncio.create_task(ranks.work.call(6.0))
            await until(lambda: ranks.status().replicas[0].in_flight == 1)
            os.kill(pids[1], signal.SIGSTOP)
            await until(lambda: states(ranks) != ["up"])
            assert "timeout waiting for message" in ranks.status().replicas[0].error
            os.kill(pids[1], signal.SIGCONT)
            await until(lambda: states(ranks) == ["up"])
            assert ranks.status().restarts == 1
            assert await ranks.pid.call() == pids
            # What was there before has ended: its call, then the component.
            assert await ranks.most.call() == [1, 1]
            with suppress(ReplicaDied):
                await working
            await ranks.stop()
            assert alive(pids) == pids

    run_within(100, main)


@pytest.mark.full
def test_a_lost_process_of_a_user_is_dropped_in_one_line(capfd: pytest.CaptureFixture):
    async def main() -> None:
        async with procs_of(2) as mesh:
            service = await Counter.options(hosts=mesh, num_replicas=2).as_service()
            first, second = [pid for _, pid in await service.where.fanout()]
            os.kill(second, signal.SIGKILL)
            await until(lambda: states(service) == ["up", "failed"])
            assert {pid for _, pid in [await service.where.route() for _ in range(4)]} == {first}
            assert "ProcMesh of yours" in service.status().replicas[1].error
            # Growing again needs the lost process.
            with pytest.raises(Unrecoverable, match=r"counter\[1\] ran in a ProcMesh of yours"):
                await service.scale(2)
            assert await service.add.route(1) == 1
            os.kill(first, signal.SIGKILL)
            with pytest.raises(ReplicaDied, match=r"no replica of counter is left.*ProcMesh of yours"):
                await service.add.route(1)

    with pytest.raises(ReplicaDied, match="no replica of counter is left"):
        run_within(100, main)
    lines = [line for line in capfd.readouterr().err.splitlines() if "given up" in line]
    assert lines == [
        f"forge: counter[{index}] is given up: counter[{index}] ran in a ProcMesh of yours, whose processes only you "
        "can start again; with a HostMesh as hosts, lost processes are replaced"
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
def test_errors_of_a_component_leave_the_processes_and_a_dead_one_is_known():
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
        with pytest.raises(ReplicaDied, match=r"no replica of parser is left.*ProcMesh of yours"):
            await waiting

    run_within(100, main)


def test_a_mesh_has_no_process_for_a_further_replica():
    async def main() -> None:
        async with procs_of(2) as mesh:
            service = await Counter.options(hosts=mesh, num_replicas=2).as_service()
            with pytest.raises(ForgeError, match=r"^counter: all 2 processes of its ProcMesh are taken$"):
                await service.scale(3)
            await service.scale(1)
            await service.scale(2)
            assert await service.add.fanout(1) == [1, 1]

    run_within(100, main)


def test_hosts_of_a_job_are_filled_in_turn_and_replace_what_is_lost():
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


def test_this_host_is_the_controllers():
    async def main() -> None:
        options = ServiceConfig(hosts=LocalJob(["trainers"]).state(cached_path=None), num_replicas=2)
        service = await Counter.options(options).as_service()
        pids = [pid for _, pid in await service.where.fanout()]
        os.kill(pids[0], signal.SIGKILL)
        await until(lambda: states(service) == ["up", "up"] and service.status().restarts == 1)
        alone = await Counter.options(hosts=this_host(), env={"FLAG": "set"}).as_actor()
        assert await alone.environment.call_one("FLAG") == "set"

    run_within(100, main)


def test_sizes_that_do_not_divide_are_errors_of_one_line():
    job = ProcessJob({"a": 4, "b": 1})
    try:
        state = job.state(cached_path=None)
        hosts: HostMesh = state.a
        procs = this_host().spawn_procs({"gpus": 6})
        wrong = [
            (
                {"hosts": procs, "num_replicas": 4},
                "a ProcMesh of 6 processes, and num_replicas = 4 of procs = 1 need 4",
            ),
            ({"hosts": procs, "procs": 4}, "num_replicas = 1 of procs = 4 need 4"),
            (
                {"hosts": procs, "env": {"A": "b"}},
                "env does nothing: hosts is a ProcMesh of 6 processes",
            ),
            ({"hosts": hosts, "num_replicas": 3}, "a HostMesh of 4 hosts, over which num_replicas = 3"),
            (
                {"hosts": hosts, "num_replicas": 3, "procs": 2},
                "of 4 hosts, over which num_replicas = 3 of procs = 2 cannot be divided evenly",
            ),
            ({"hosts": hosts, "procs": 6}, "num_replicas = 1 of procs = 6 cannot be divided evenly"),
            ({"hosts": hosts, "share": "x"}, "shares the process 'x'"),
            ({"hosts": job}, r"hosts is a ProcessJob: hand over its state, hosts=job\.state\(\)"),
            ({"hosts": "node1"}, "hosts must be a whole number, got 'node1'"),
        ]
        for options, message in wrong:
            with pytest.raises(ConfigError, match=message) as raised:
                Options(**options)
            assert "\n" not in str(raised.value)
        with pytest.raises(ValueError, match=r"the job has the meshes a, b, none of them 'counter': write .*\(\)\.a"):
            Counter.options(hosts=state).as_service()
        assert Options(hosts=procs, num_replicas=2).procs == 3
        assert Options(hosts=procs, num_replicas=6).procs == 1
        assert Options(hosts=hosts, procs=4).hosts.describe() == "a HostMesh of 4 hosts"
        procs.stop().get()
    finally:
        job.kill()


def test_ranks_on_another_machine_are_an_error_of_one_line(tmp_path: Path):
    with pytest.raises(
        ConnectionError, match=r"^the ranks of this process group meet in .*/gone, a folder of the contr"
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


def test_services_of_a_mesh_have_different_devices():
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
