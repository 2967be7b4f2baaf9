"""Runs a program of plain Monarch in the process of a controller, whose service serves before, meanwhile and after.

python -m tests.runtime.monarch.alongside PROGRAM.py
"""

import asyncio
import os
import runpy
import signal
import sys

import monarch.actor

from forge.runtime.controller import run
from tests.runtime.controller.components import Counter
from tests.runtime.controller.test_recovery import states, until


def hosts_from_config(name: str) -> monarch.actor.HostMesh:
    """Two hosts, for programs that were written for a later version of Monarch, which has this function."""
    from monarch.job import ProcessJob

    mesh: monarch.actor.HostMesh = ProcessJob({"hosts": 2}).state(cached_path=None).hosts
    return mesh


async def main(program: str) -> None:
    """Serve alongside the program, and replace a lost process once it has ended."""
    if not hasattr(monarch.actor, "hosts_from_config"):
        monarch.actor.hosts_from_config = hosts_from_config
    service = await Counter.options(num_replicas=2).as_service()
    assert await service.add.fanout(1) == [1, 1]
    # The program blocks its thread with `Future.get`.
    working = asyncio.create_task(asyncio.to_thread(runpy.run_path, program, run_name="__main__"))
    calls = 0
    while not working.done():
        calls += 1
        assert await service.add.fanout(1) == [1 + calls] * 2
        await asyncio.sleep(0.1)
    await working
    # The program may have set a fault hook of its own.
    os.kill((await service.where.fanout())[0][1], signal.SIGKILL)
    await until(lambda: states(service) == ["up", "up"] and service.status().restarts == 1)
    print(f"SERVED {calls > 0} {await service.add.fanout(0) == [0, 1 + calls]}", flush=True)


if __name__ == "__main__":
    run(main(sys.argv[1]))
