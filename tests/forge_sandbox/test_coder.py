"""Programs of a policy in sandboxes of replicas."""

import asyncio
import os
import signal

import pytest

from forge_sandbox import SandboxedPythonCoder

pytestmark = pytest.mark.processes


@pytest.mark.full
async def test_coder_service_replicas_run_programs_and_survive_kill():
    coder = await SandboxedPythonCoder.options(num_replicas=2).as_service(workers=1)
    results = await asyncio.gather(*(coder.execute.route(f"print({n} * 2)") for n in range(6)))
    assert [(result.status, result.stdout) for result in results] == [("ok", f"{2 * n}\n") for n in range(6)]
    assert (await coder.execute.route("while True: pass", time_limit=0.5)).status == "timeout"
    assert len({*await coder.level.fanout()}) == 1
    slow = [asyncio.create_task(coder.execute.route("import time; time.sleep(1); print('done')")) for _ in range(2)]
    await asyncio.sleep(0.3)
    os.kill(coder.status().replicas[0].pids[0], signal.SIGKILL)
    assert [result.stdout for result in await asyncio.gather(*slow)] == ["done\n"] * 2
