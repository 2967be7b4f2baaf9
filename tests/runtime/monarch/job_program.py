"""Services on the hosts of a job of Monarch's, as a program of its user: `job_program KIND FOLDER`.

Prints JSON objects with what `tests/runtime/monarch/test_jobs.py` checks. A file `lost` in the folder asks for the last
part: a host or a process is gone by then. The variable UNSEEN is the patience with a silent process of which nothing
tells what it does. `procs` hands over processes that the program has spawned. `submit` sends a Slurm job that runs this
program as `batch` within itself.
"""

import asyncio
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from forge.runtime.controller import ForgeActor, endpoint, patience, run

MESHES = {"adder": 2, "judge": 1}
WAIT = 0.2  # seconds between looks for a file


class Adder(ForgeActor):
    """Adds, and says on which host."""

    def __init__(self, start: int) -> None:
        self.value = start

    @endpoint
    def host(self) -> str:
        return socket.gethostname()

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def add(self, number: int) -> int:
        self.value += number
        return self.value

    @endpoint
    def total(self, values: torch.Tensor) -> float:
        return float(values.sum())


class Judge(Adder):
    """Another component, with a mesh of its name."""


def new_job(kind: str, folder: Path) -> Any:
    """The job of a user who follows Monarch's documentation."""
    if kind not in ("kubernetes", "procs"):
        from monarch.job import SlurmJob

        settings = {"exclusive": False, "log_dir": str(folder), "job_start_timeout": 120, "time_limit": "00:20:00"}
        return SlurmJob(MESHES, python_exe=sys.executable, **settings)
    from monarch.job.kubernetes import ImageSpec, KubernetesJob

    job = KubernetesJob("lab", timeout=120)
    for name, hosts in MESHES.items():
        job.add_mesh(name, hosts, image_spec=ImageSpec("registry.example/forge:1"))
    return job


async def main(kind: str, folder: Path) -> None:
    # Also Monarch's client starts with the first component: too early, it listens where only this machine reaches it.
    job = None if kind == "late" else new_job(kind, folder)
    # A component of this machine comes before the job's machines, which do not have its folders.
    first = await Adder.as_actor(0)
    job = job or new_job("kubernetes", folder)
    if kind == "batch":
        state = job.state()  # of the job that this program is in
    else:
        job.apply()
        state = job.state(cached_path=None)
    hosts = state.adder.spawn_procs({"procs": 1}) if kind == "procs" else state
    # Each component gets the mesh of its name.
    adders = await Adder.options(hosts=hosts, num_replicas=2).as_service(10)
    judge = await Judge.options(hosts=state).as_actor(0)
    large = torch.ones(3_000_000)  # 12 MB
    report: dict[str, Any] = {
        "adders": await adders.host.fanout(),
        "pids": await adders.pid.fanout(),
        "judge": await judge.host.call(),
        "sums": sorted(await adders.add.fanout(5)),
        "total": await judge.total.call(large),
        "here": await first.host.call_one(),
    }
    print(json.dumps(report), flush=True)
    lost = folder / "lost"
    while not lost.exists():
        await asyncio.sleep(WAIT)
    # The other replica serves all calls, those that were sent to the lost one as well.
    answers = await asyncio.gather(*(adders.host.route() for _ in range(20)))
    status = adders.status()
    losses = status.restarts + sum(replica.state != "up" for replica in status.replicas)
    print(json.dumps({"answers": len(answers), "hosts": sorted({*answers}), "losses": losses}), flush=True)
    await first.stop()
    await judge.stop()
    await adders.stop()
    job.kill()


def submit(folder: Path) -> None:
    """Submit a job whose client is this program."""
    program = f"{sys.executable} -m tests.runtime.monarch.job_program batch {folder}"
    new_job("slurm", folder).apply(client_script=program)


if __name__ == "__main__":
    _, kind, name = sys.argv
    patience.UNSEEN_PATIENCE = float(os.environ.get("UNSEEN", patience.UNSEEN_PATIENCE))
    if kind == "submit":
        submit(Path(name))
    else:
        run(main(kind, Path(name)))
