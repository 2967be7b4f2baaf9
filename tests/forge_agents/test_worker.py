"""Workers: episodes at once, and what becomes of them when the process dies, hangs or writes another format."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("openai")

from forge_agents.collection import Worker
from forge_envs.environment import InfrastructureError

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).with_name("collections") / "odd_worker.py"


def with_worker(use, environment="odd", command=(sys.executable, str(SCRIPT)), **options):
    """What `use` returns of a worker, which is closed then."""

    async def run():
        worker = Worker(command, {"environment": environment, "args": {}}, **options)
        try:
            return await use(worker)
        finally:
            await worker.close()

    return asyncio.run(run())


def play(worker, timeout=60.0, **task):
    return worker.request("play", timeout, task=task, url="http://gateway/s/key", model="policy")


def exists(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_collection_worker_plays_episodes_concurrently(tmp_path):
    async def use(worker):
        slow = asyncio.create_task(play(worker, act="wait", seconds=1.0))
        quick = await play(worker)
        assert not slow.done()
        return quick, await slow, worker.starts

    quick, slow, starts = with_worker(use, env={"CLOSED": str(tmp_path / "closed")})
    assert quick["reward"] == 1.0
    assert quick["metrics"]["url"] == "http://gateway/s/key"
    assert quick["metrics"]["pid"] == slow["metrics"]["pid"] != os.getpid()
    assert starts == 1
    assert (tmp_path / "closed").exists()
    assert not exists(slow["metrics"]["pid"])


def test_dead_collection_worker_loses_episodes_and_restarts(tmp_path):
    async def use(worker):
        other = asyncio.create_task(play(worker, act="wait"))
        await asyncio.sleep(0)
        with pytest.raises(InfrastructureError, match="ended with exit code -9"):
            await play(worker, act="die once", mark=str(tmp_path / "mark"))
        with pytest.raises(InfrastructureError, match="ended with exit code -9"):
            await other
        again = await play(worker, act="die once", mark=str(tmp_path / "mark"))
        return again["reward"], worker.starts

    assert with_worker(use) == (1.0, 2)


def test_hung_collection_worker_is_killed_and_loses_episodes():
    async def use(worker):
        pid = (await play(worker))["metrics"]["pid"]
        other = asyncio.create_task(play(worker, act="wait"))
        await asyncio.sleep(0)
        with pytest.raises(InfrastructureError, match="no result of 'play' within 0"):
            await play(worker, timeout=0.1, act="wait")
        with pytest.raises(InfrastructureError, match="the agent worker did not respond"):
            await play(worker, timeout=0.5, act="hang")
        with pytest.raises(InfrastructureError, match="ended with exit code -9"):
            await other
        again = await play(worker)
        return pid, again["metrics"]["pid"], exists(pid)

    first, second, lives = with_worker(use, grace=0.5)
    assert first != second
    assert not lives


@pytest.mark.full
def test_collection_worker_ends_with_controller_process(tmp_path):
    program = f"""
import asyncio, os, signal, sys
from forge_agents.collection import Worker

async def main():
    worker = Worker([{sys.executable!r}, {str(SCRIPT)!r}], {{"environment": "odd", "args": {{}}}})
    result = await worker.request("play", 60, task={{}}, url="", model="")
    print(result["metrics"]["pid"], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""

    async def run():
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        pid = int(await process.stdout.readline())
        await process.wait()
        for _ in range(300):
            if not exists(pid):
                return True
            await asyncio.sleep(0.1)
        return False

    assert asyncio.run(run())
