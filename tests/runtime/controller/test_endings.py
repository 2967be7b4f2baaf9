"""However a run ends, it ends in time, says why, and leaves no process behind."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from forge.system.scratch import sweep_folders

pytestmark = pytest.mark.processes

SCRIPT = """
    import asyncio, sys
    from forge.runtime.controller import run
    from tests.runtime.controller.components import Counter

    async def main():
        service, helper = await asyncio.gather(
            Counter.options(max_restarts=0).as_service(),
            Counter.options(share="helpers", max_restarts=0).as_actor(),
        )
        pids = [pid for _, pid in await service.where.fanout()] + [(await helper.where.route())[1]]
        print("READY", *pids, flush=True)
        {body}

    run(main())
"""


def start(body: str) -> tuple[subprocess.Popen, list[int]]:
    """A controller in a separate process; returns once its components serve."""
    script = textwrap.dedent(SCRIPT).replace("{body}", body)
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("READY"):
            return process, [int(pid) for pid in line.split()[1:]]
    raise AssertionError(f"the controller ended early: {process.communicate()[1]}")


def alive(pids: list[int]) -> list[int]:
    """Those that still run; a zombie has ended."""
    found = []
    for pid in pids:
        status = Path(f"/proc/{pid}/stat")
        if status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z":
            found.append(pid)
    return found


def gone_within(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def leaves_nothing(process: subprocess.Popen, pids: list[int], seconds: float = 10) -> bool:
    """Neither a process of the run nor its temporary files."""
    folder, mine = Path(os.environ.get("TMPDIR", tempfile.gettempdir())), f"forge-run-{process.pid}-*"
    deadline = time.monotonic() + seconds
    while alive(pids) or list(folder.glob(mine)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


WAIT = "await asyncio.sleep(120)"


def test_successful_run_leaves_no_processes_or_files():
    process, pids = start("pass")
    assert process.wait(30) == 0
    assert leaves_nothing(process, pids)


def test_exception_ends_run_without_leftover_processes_or_files():
    process, pids = start("await service.fail.route('gone wrong')")
    _, error = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "KeyError: 'gone wrong'" in error
    assert leaves_nothing(process, pids)


def test_ctrl_c_ends_run_without_traceback_or_leftover_processes():
    process, pids = start(WAIT)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in error
    assert leaves_nothing(process, pids)


def test_second_ctrl_c_ends_run_without_traceback():
    process, pids = start(WAIT)
    os.killpg(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in error
    assert "Exception ignored" not in error
    assert gone_within(pids, 10)


def test_killed_controller_leaves_no_processes_and_files_are_swept():
    process, pids = start(WAIT)
    folder = Path(tempfile.gettempdir())
    assert list(folder.glob(f"forge-run-{process.pid}-*"))
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    assert gone_within(pids, 20)
    sweep_folders()
    assert not list(folder.glob(f"forge-run-{process.pid}-*"))


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
@pytest.mark.parametrize("which", [pytest.param(0, marks=pytest.mark.full), 1])
def test_lost_component_without_replacement_ends_run_with_component_name(number, which):
    process, pids = start(WAIT)
    os.kill(pids[which], number)
    _, error = process.communicate(timeout=15)
    assert process.returncode == 1
    name = ["counter", "counter2"][which]
    assert f"ReplicaDied: no replica of {name} is left. {name}[0] is dead (pid {pids[which]})" in error
    assert leaves_nothing(process, pids)
