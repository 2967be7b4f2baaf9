"""A busy machine makes a run slow and costs it nothing: no limit of time decides about what gets CPU time."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forge.runtime.controller.patience import Patience
from forge.runtime.process import activity_of

pytestmark = pytest.mark.processes

SCRIPT = """
import asyncio, os
from forge.runtime.controller import run
from tests.runtime.controller.components import Counter

async def main():
    os.environ["PAUSE"] = os.environ.get("PAUSE_OF_CHILDREN", "0")
    service = await Counter.options(num_replicas=2).as_service()
    print(await service.add.fanout(1) == [1, 1], flush=True)

run(main())
"""


def run_script(*prefix: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script's end, in a process group of its own."""
    words = [*prefix, sys.executable, "-c", textwrap.dedent(SCRIPT)]
    paths = os.pathsep.join(filter(None, [str(path or ""), os.getcwd(), os.environ.get("PYTHONPATH")]))
    return subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths, **environment})


@contextmanager
def busy(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.full
def test_process_start_longer_than_30_seconds_raises(tmp_path: Path):
    # Monarch waits 30 s for a process to call back; those of the fork server call back at once, whatever imports take.
    (tmp_path / "sitecustomize.py").write_text("import os, time\ntime.sleep(float(os.environ.get('PAUSE', 0)))\n")
    done = run_script(path=tmp_path, PAUSE_OF_CHILDREN="36", FORGE_FORK_SERVER="0")
    assert done.returncode == 1
    assert "Monarch gave up its start, after at most 30 s" in done.stderr


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(600)"], ids=["spins", "sleeps"])
def test_start_timeout_expires_after_cpu_time_or_idleness(program: str):
    process = subprocess.Popen([sys.executable, "-c", f"print(flush=True)\n{program}"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    first = activity_of(process.pid)
    patience = Patience(first, 0.6)
    while patience.is_left(activity_of(process.pid)):
        signal.sigtimedwait([], 0.05)
    assert (activity_of(process.pid).cpu_seconds - first.cpu_seconds >= 0.5) == program.startswith("while")
    process.kill()
    process.wait()
