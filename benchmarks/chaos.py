"""Every kind of component, lost in every kind of way, while a small GRPO pipeline runs: what its callers saw, how long
it took, and whether every prompt still got exactly its group of completions.

    OMP_NUM_THREADS=1 python benchmarks/chaos.py
    OMP_NUM_THREADS=1 python benchmarks/chaos.py --components generator,trainer --faults SIGKILL,SIGSTOP
    OMP_NUM_THREADS=1 python benchmarks/chaos.py --components machine

Components and weights are real, each in processes of its own; the generators live on two hosts. In each cell one fault
hits one process while a call is being served there and training continues around it. Data set and replay buffer live
in the controller, as in the recipes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from forge.actors import DatasetActor, Generator, ReferenceModel, ReplayBuffer, RewardActor, Trainer
from forge.algorithms.advantages import group_relative
from forge.data.packing import pack
from forge.losses import GRPOLoss
from forge.models import build_small_model
from forge.runtime.controller import Service, endpoint, first_to_end, run, runtime
from forge.runtime.store import VersionStore
from forge.types import Episode, Group

from machine import Clock, descendants, memory_limit, suspend  # isort: skip - alongside this file

COMPONENTS = ("generator", "reward", "reference", "trainer", "host", "machine")
FAULTS = ("SIGKILL", "SIGSTOP", "endless loop", "exception in setup", "exception in an endpoint", "memory limit")
FAULTS += ("out of memory",)
# Of all processes at once.
MACHINE = ("suspended for 30 s", "clock a day ahead", "clock a day back")
# What the test-suite plays: each way of being lost, and each kind of component that keeps state.
FAST = (
    ("generator", "endless loop"),
    ("generator", "exception in an endpoint"),
    ("reward", "SIGSTOP"),
    ("trainer", "SIGKILL"),
    ("reference", "exception in setup"),
    ("host", "SIGKILL"),
)
BATCH, SAMPLES, STEPS = 8, 4, 5
MEMORY_GB = 6.0


def misbehaving(cls: type, folder: Path) -> Any:
    """The component, with an endpoint that does it harm and a setup that fails, each once after its file was made."""
    folder.mkdir()

    def take(flag: Path) -> bool:
        try:
            flag.unlink()
        except FileNotFoundError:
            return False
        return True

    def setup(self: Any) -> None:
        if take(folder / "setup"):
            raise RuntimeError("injected: setup failed")
        cls.setup(self)

    @endpoint
    async def harm(self: Any, fault: str) -> str:
        """Answers, unless this is the last rank and the fault's file is there."""
        if self.context.rank < self.context.world_size - 1 or not take(folder / "armed"):
            return "answer"
        if fault == "endless loop":
            while True:
                pass
        if fault == "exception in setup":
            os._exit(1)
        if fault == "exception in an endpoint":
            raise ValueError("injected")
        if fault == "out of memory":  # of its cgroup: the kernel kills
            return str(sum(bytearray(b"x" * (1 << 30))[:: 1 << 12]))
        if fault == "memory limit":
            return str(len(bytearray(int(2e9 * MEMORY_GB))))
        await asyncio.sleep(60)  # killed or stopped from outside meanwhile
        return "never"

    return type(f"Misbehaving{cls.__name__}", (cls,), {"setup": setup, "harm": harm, "__module__": "__main__"})


@dataclass
class System:
    """The components of a run, and what has been trained so far."""

    services: dict[str, Service]
    folder: Path
    version: int = 0
    trained: list[Group] = field(default_factory=list)

    @classmethod
    async def start(cls, folder: Path, store: VersionStore) -> System:
        alphabet = "abcdefghijklmnopqrstuvwxyz>"
        size = {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 2, "max_positions": 64}
        model = build_small_model(folder / "model", seed=0, alphabet=alphabet, **size)
        data = {"task": "apps.toys.words:Reverse", "difficulty": [2, 4], "prompt_template": "{question}>"}
        training = {"loss": GRPOLoss(beta=0.1), "optimizer": {"learning_rate": 1e-3}, "store": store, "seq_len": 256}

        async def service(name: str, kind: type, options: dict[str, Any], *args: Any, **kwargs: Any) -> Service:
            harmful = misbehaving(kind, folder / name)
            placed = harmful.options(mesh_name=name, memory_gb=MEMORY_GB, call_timeout=120, **options)
            return await placed.as_service(*args, **kwargs)

        starts = {
            "generator": service(
                "generator", Generator, {"num_replicas": 2, "hosts": 2}, model, store=store, max_tokens=8
            ),
            "reward": service("reward", RewardActor, {"num_replicas": 2}, ["CharacterMatch"]),
            "reference": service("reference", ReferenceModel, {}, model, seq_len=256),
            "trainer": service(
                "trainer", Trainer, {"procs": 2}, model, recovery=str(folder / "checkpoints"), **training
            ),
            "buffer": ReplayBuffer.as_local(4 * BATCH),
            "dataset": DatasetActor.as_local(model, **data),
        }
        started = dict(zip(starts, await asyncio.gather(*starts.values()), strict=True))
        return cls(started, folder)

    async def train(self, steps: int) -> None:
        """Go on for some steps of GRPO, one version of asynchrony."""
        s, end = self.services, self.version + steps
        numbers, admitted = count(self.version * BATCH), asyncio.Condition()

        async def rollout(index: int) -> None:
            prompt, target = await s["dataset"].sample.route()
            completions = await s["generator"].generate.route(prompt, n=SAMPLES, seed=index)
            rewards = await s["reward"].evaluate_group.route(prompt, [c.text for c in completions], target)
            episodes = [Episode(c, r) for c, r in zip(completions, rewards, strict=True)]
            # Without a limit on age: what a fault delays is trained late here, and not replaced by something younger.
            await s["buffer"].add.route(Group(episodes, index, target, prompt.text))

        async def rollouts() -> None:
            async with asyncio.TaskGroup() as tasks:
                for index in numbers:
                    async with admitted:
                        await admitted.wait_for(lambda: index < min(end, self.version + 2) * BATCH)  # noqa: B023
                    tasks.create_task(rollout(index))

        async def training() -> None:
            while self.version < end:
                groups = await s["buffer"].sample.route(self.version, BATCH)
                for group in groups:
                    for episode, advantage in zip(group.episodes, group_relative(group.rewards), strict=True):
                        episode.advantage = advantage
                batch = pack([episode for group in groups for episode in group.episodes])
                batch.ref_logprobs = await s["reference"].logprobs.route(batch)
                await s["trainer"].train_step.route(batch)
                self.trained += groups
                self.version += 1
                await s["trainer"].push_weights.call(self.version)
                await s["generator"].update_weights.fanout(self.version)
                async with admitted:
                    admitted.notify_all()
                if self.version % 5 == 0:
                    await s["trainer"].save_checkpoint.call(str(self.folder / "checkpoints"))

        await first_to_end(training(), rollouts())

    def once(self, first: int, last: int) -> str:
        """Whether steps first to last trained every prompt of theirs once, with all of its completions."""
        groups = self.trained[first * BATCH : last * BATCH]
        right = sorted(group.index for group in groups) == list(range(first * BATCH, last * BATCH))
        whole = all(len(group.episodes) == SAMPLES for group in groups)
        return f"{len(groups)} of {(last - first) * BATCH}" if right and whole else "NO"


@dataclass
class Cell:
    component: str
    fault: str
    saw: str = ""
    detected: float | None = None
    recovered: float | None = None
    once: str = ""

    def __str__(self) -> str:
        times = " | ".join("lived on" if t is None else f"{t:.1f}" for t in (self.detected, self.recovered))
        return f"| {self.component} | {self.fault} | {self.saw} | {times} | {self.once} |"


async def play(system: System, cell: Cell) -> None:
    """One fault: injected after the first of the cell's steps, while the pipeline runs."""
    first = system.version
    training = asyncio.create_task(system.train(STEPS))
    async with asyncio.timeout(60):
        while system.version == first:
            await asyncio.sleep(0.01)
    if cell.component == "machine":
        await shake(cell)
    else:
        await harm(system, cell)
    await asyncio.wait_for(training, 180)
    cell.once = system.once(first, system.version)


async def shake(cell: Cell) -> None:
    """What happens to all processes at once. None of them should be lost by it."""
    restarts = sum(service.status().restarts for service in runtime().services.values())
    if cell.fault.startswith("suspended"):
        await asyncio.to_thread(suspend, descendants(os.getpid()), 30.0)
    else:
        before = time.time()
        Clock().set(86_400 if cell.fault.endswith("ahead") else -86_400)
        assert abs(time.time() - before) > 80_000
    await asyncio.sleep(5)
    cell.saw = f"{sum(service.status().restarts for service in runtime().services.values()) - restarts} lost"


async def harm(system: System, cell: Cell) -> None:
    name = "generator" if cell.component == "host" else cell.component
    service = system.services[name]
    folder = system.folder / name
    (folder / "armed").touch()
    if cell.fault == "exception in setup":
        (folder / "setup").touch()
    before = service.status().restarts
    group = None
    if cell.fault == "out of memory":
        group = memory_limit((replica.pids[-1] for replica in service.status().replicas), 300 << 20)
    start = time.monotonic()
    call = asyncio.create_task(service.harm.options(timeout=90).route(cell.fault))
    watch = asyncio.create_task(losses(service, before, cell))
    if cell.fault.startswith("SIG"):
        while (folder / "armed").exists():
            await asyncio.sleep(0.005)
        index = next(i for i, one in enumerate(service._supervisors) if call_of_harm(one.replica))
        pids = (
            runtime().placement.hosts[name][index].pids()
            if cell.component == "host"
            else service.status().replicas[index].pids
        )
        start = time.monotonic()
        os.kill(pids[-1], getattr(signal, cell.fault))
    try:
        cell.saw = await call
    except Exception as error:
        cell.saw = f"{type(error).__name__}"
    try:
        lost, up = await asyncio.wait_for(watch, 60 if cell.saw == "answer" else 1)
        cell.detected, cell.recovered = lost - start, up - start
    except TimeoutError:
        if service.status().restarts != before:
            raise
    if group is not None:
        for pid in (group / "cgroup.procs").read_text().split():
            (group.parent / "cgroup.procs").write_text(pid)
        group.rmdir()


def call_of_harm(replica: Any) -> bool:
    return any(request.endpoint == "harm" for request in replica.requests)


async def losses(service: Service, before: int, cell: Cell) -> tuple[float, float]:
    """When a replica was found lost, and when all of them served again."""
    while all(replica.state == "up" for replica in service.status().replicas):
        await asyncio.sleep(0.005)
    lost = time.monotonic()
    while service.status().restarts == before or any(r.state != "up" for r in service.status().replicas):
        await asyncio.sleep(0.005)
    return lost, time.monotonic()


def cells(components: list[str], faults: list[str]) -> Iterator[Cell]:
    for component in components:
        for fault in MACHINE if component == "machine" else faults:
            # A host runs no code of a component: only its process can be lost.
            if component != "host" or fault.startswith("SIG"):  # a machine has no process of its own
                yield Cell(component, fault)


async def main(played: list[Cell], folder: Path, store: VersionStore) -> bool:
    system = await System.start(folder, store)
    await system.train(2)
    print("| component | fault | the caller saw | lost after, s | serving again after, s | groups trained once |")
    print("|---|---|---|---|---|---|", flush=True)
    for number, cell in zip(count(1), played, strict=False):
        await play(system, cell)
        print(cell, flush=True)
        print(f"{number} of {len(played)}", file=sys.stderr, flush=True)
    total = system.once(0, system.version)
    print(f"\nWhole run, {system.version} steps: {total} groups trained once")
    return total != "NO" and all(cell.once != "NO" for cell in played)


def choice(text: str, known: tuple[str, ...]) -> list[str]:
    chosen = [word.strip() for word in text.split(",")]
    if unknown := set(chosen) - set(known):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    return chosen


if __name__ == "__main__":
    sys.path.append(os.getcwd())  # the task is apps.toys.words
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--components", default=",".join(COMPONENTS))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--fast", action="store_true", help="a few telling cells instead")
    args = parser.parse_args()
    if "machine" in args.components and not args.fast and (why := Clock.install()) is not None:
        raise SystemExit(f"the clock cannot be set: {why}; leave out the component machine")
    chosen = list(cells(choice(args.components, COMPONENTS), choice(args.faults, FAULTS)))
    with tempfile.TemporaryDirectory() as name:
        store = VersionStore.create()
        try:
            fine = run(main([Cell(*pair) for pair in FAST] if args.fast else chosen, Path(name), store))
        finally:
            store.close()
    sys.exit(0 if fine else "some groups were lost or doubled")
