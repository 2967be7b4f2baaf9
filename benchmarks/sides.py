"""Two sides of a benchmark, each in processes of its own, taking turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Steps that are not measured: kernels are prepared and memory is taken in them.
WARMUP = 2
SHOWN = "FORGE_BENCHMARK "


def as_a_component() -> None:
    """Start this script again in the environment of a component's process, unless it has it: one thread, the
    allocator's settings. Libraries read it when they are loaded."""
    from forge.runtime.controller.processes import library_environment

    if not library_environment().items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | library_environment())


def _family() -> dict[int, float]:
    """This process and all its descendants, with their user and system time in seconds."""
    root = os.getpid()
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            parents[int(entry.name)] = int(fields[1])
            seconds[int(entry.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def belongs(pid: int) -> bool:
        while pid and pid != root:
            pid = parents.get(pid, 0)
        return pid == root

    return {pid: used for pid, used in seconds.items() if belongs(pid)}


def cpu_seconds() -> float:
    """User and system time of this process and all its descendants that live."""
    return sum(_family().values())


def peak_memory() -> float:
    """Largest resident memory of this process and its living descendants, in MB, shared pages divided among them."""
    total = 0
    for pid in _family():
        text = Path(f"/proc/{pid}/status").read_text() + Path(f"/proc/{pid}/smaps_rollup").read_text()
        peak, resident, share = (int(text.split(name)[1].split()[0]) for name in ("VmHWM:", "VmRSS:", "\nPss:"))
        total += peak - resident + share
    return total / 1000


class Clock:
    """CPU and wall time at the end of every step, its reward, and the memory that the first steps needed."""

    def __init__(self) -> None:
        self.cpu: list[float] = []
        self.wall: list[float] = []
        self.rewards: list[float] = []
        self.memory = 0.0

    def tick(self) -> None:
        if len(self.cpu) == WARMUP - 1:
            self.memory = peak_memory()
        self.cpu.append(cpu_seconds())
        self.wall.append(time.perf_counter())

    def show(self) -> None:
        """Print seconds a step after the warm-up, for `measure` to read."""
        steps = len(self.cpu) - WARMUP
        cpu, wall = ((times[-1] - times[WARMUP - 1]) / steps for times in (self.cpu, self.wall))
        print(SHOWN + json.dumps({"cpu": cpu, "wall": wall, "rewards": self.rewards, "memory": self.memory}))


def recipe(config: Any) -> Clock:
    """The real system: `apps.grpo.main` with all of its processes, without evaluation."""
    from forge.config import to_dict
    from forge.observability import Run
    from forge.recipes.components import Job
    from forge.recipes.rl import train
    from forge.runtime.controller import run
    from forge.runtime.store import VersionStore

    clock = Clock()

    class Timed(Run):
        def log(self, step: int, *values: Any, **named: float) -> dict[str, float]:
            row = super().log(step, *values, **named)
            if step:
                clock.tick()
                clock.rewards += [row["reward"]] if "reward" in row else []
            return row

    name, root, overwrite = config.run.name, config.run.root, config.run.overwrite
    record = Timed(name, to_dict(config), root=root, overwrite=overwrite, steps=config.training.steps)
    store = VersionStore.create()
    try:
        run(train(config, Job(config.model, [], record, store)))
    finally:
        store.close()
    return clock


def measure(python: str, script: str, side: str, folder: Path, threads: int = 1, **options: Any) -> dict[str, Any]:
    """Run one side of `script` and return what its clock shows."""
    settings = [f"--{name}={value}" for name, value in options.items()]
    command = [python, script, "--side", side, "--folder", str(folder), *settings]
    here = Path(__file__).resolve().parent
    env = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        # For the recipe, and for rewards that its processes import from here.
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)]),
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    shown = [line for line in done.stdout.splitlines() if line.startswith(SHOWN)]
    if done.returncode or not shown:
        raise SystemExit(f"side {side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(shown[0].removeprefix(SHOWN))
