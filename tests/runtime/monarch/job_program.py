"""Services on the hosts of a job of Monarch's, as a program of its user: `job_program slurm|kubernetes FOLDER`.

Prints a JSON object with what `tests/runtime/monarch/test_jobs.py` checks. A file `lost` in the folder asks for the
last part: one of the hosts is gone by then.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from forge.runtime.controller import ForgeActor, endpoint, run

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
    if kind == "slurm":
        from monarch.job import SlurmJob

        settings = {"exclusive": False, "log_dir": str(folder), "job_start_timeout": 120, "time_limit": "00:20:00"}
        return SlurmJob(MESHES, python_exe=sys.executable, **settings)
    from monarch.job.kubernetes import ImageSpec, KubernetesJob

    job = KubernetesJob("lab", timeout=120)
    for name, hosts in MESHES.items():
        job.add_mesh(name, hosts, image_spec=ImageSpec("registry.example/forge:1"))
    return job


async def main(kind: str, folder: Path) -> None:
    job = new_job(kind, folder)
    job.apply()
    state = job.state(cached_path=None)
    # Each component gets the mesh of its name.
    adders = await Adder.options(hosts=state, num_replicas=2).as_service(10)
    judge = await Judge.options(hosts=state).as_actor(0)
    large = torch.ones(3_000_000)  # more than a message's frame of some transports
    report: dict[str, Any] = {
        "adders": sorted(await adders.host.fanout()),
        "judge": await judge.host.call(),
        "sums": sorted(await adders.add.fanout(5)),
        "total": await judge.total.call(large),
        "here": socket.gethostname(),
    }
    print(json.dumps(report), flush=True)
    lost = folder / "lost"
    while not lost.exists():
        await asyncio.sleep(WAIT)
    # The other replica serves all calls, those that were sent to the lost host as well.
    answers = await asyncio.gather(*(adders.host.route() for _ in range(20)))
    print(json.dumps({"after": sorted({*answers})}), flush=True)
    await judge.stop()
    await adders.stop()
    job.kill()


if __name__ == "__main__":
    run(main(sys.argv[1], Path(sys.argv[2])))
