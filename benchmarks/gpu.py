"""The first half hour on a GPU, with verdicts: is it right, does it fit, how fast is it.

    python benchmarks/gpu.py                          # on a GPU: a model of Qwen3-0.6B's shape, random weights
    python benchmarks/gpu.py --size tiny --quick      # anywhere: the same path, figures without meaning
    python benchmarks/gpu.py --parts waits training   # some of it

Each part is a process of its own with a time limit. Those that compare numbers run `--jobs` at once; those that measure
run only. Each line of the table has a figure and, where there is one, its limit; the script fails if one is exceeded.
`colocated` goes on from the quickstart's warm-up, runs/quickstart-warmup/model, and makes it where it is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import torch
from gpu_attention import attention
from gpu_exact import FAMILIES, correctness, gradients, moves, repeat, shapes, waits
from gpu_planned import planned_peaks
from gpu_setup import SIZES, Row, Setup, build_model
from gpu_speed import (
    colocated,
    device,
    device_name,
    generation,
    lengths,
    long_samples,
    published,
    training,
    weight_sync,
)
from sides import as_a_component


class Part(NamedTuple):
    """What a process does, within how many seconds on a GPU, and whether it must be only."""

    act: Callable[[Setup], Iterator[Row]]
    limit: int
    alone: bool = True


PARTS = {
    **{f"gradients_{family}": Part(partial(gradients, family), 240, alone=False) for family in FAMILIES},
    "correctness": Part(correctness, 120, alone=False),
    "shapes": Part(shapes, 240, alone=False),
    "waits": Part(waits, 120, alone=False),
    "repeat": Part(repeat, 120, alone=False),
    "moves": Part(moves, 120, alone=False),
    "colocated": Part(colocated, 240, alone=False),
    "device": Part(device, 60),
    "training": Part(partial(training, False), 120),
    "training_compiled": Part(partial(training, True), 180),
    "published": Part(partial(published, False), 240),
    "published_lora": Part(partial(published, True), 180),
    "attention": Part(attention, 120),
    "planned": Part(planned_peaks, 240),
    "generation": Part(generation, 180),
    "lengths": Part(lengths, 120),
    "long_samples": Part(long_samples, 120),
    "weight_sync": Part(weight_sync, 120),
}


def begin(setup: Setup) -> Iterator[Row]:
    """Write the model, and say on what this runs."""
    parameters = build_model(setup)
    yield Row(f"{device_name(setup)}, torch {torch.__version__}", f"{setup.size}, {parameters / 1e6:.0f}M parameters")


def carry_out(name: str, act: Callable[[Setup], Iterator[Row]], setup: Setup, rows: Path) -> None:
    """A part's process: its rows go to a file, one a line."""
    os.setpgid(0, 0)  # with what it starts it can be ended
    with rows.open("w") as file:
        try:
            for row in act(setup):
                file.write(json.dumps([row.what, row.figure, row.limit, bool(row.passed)]) + "\n")
                file.flush()
        except Exception as error:
            traceback.print_exc()
            reason = str(error).strip().splitlines() or [""]
            file.write(json.dumps([name, f"{type(error).__name__}: {reason[0][:160]}", "", False]) + "\n")


class Run:
    """A part that runs."""

    def __init__(self, name: str, part: Part, setup: Setup) -> None:
        self.name, self.rows = name, setup.folder / f"{name}.rows"
        self.ends = time.monotonic() + part.limit
        # Forked before this process opens the device: its imports are there at once.
        self.process: BaseProcess = get_context("fork").Process(
            target=carry_out, args=(name, part.act, setup, self.rows)
        )
        self.process.start()

    def finished(self) -> bool:
        """Whether it has ended; it is ended at its limit."""
        if self.process.is_alive() and time.monotonic() < self.ends:
            return False
        late = self.process.is_alive()
        if late:
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join()
        if late or self.process.exitcode:
            why = "did not end within its limit" if late else f"ended with {self.process.exitcode}"
            with self.rows.open("a") as file:
                file.write(json.dumps([self.name, why, "", False]) + "\n")
        return True


def results(parts: dict[str, Part], setup: Setup, jobs: int) -> Iterator[Row]:
    """The rows of all parts, as they end."""
    waiting, running = dict(parts), list[Run]()
    while waiting or running:
        while waiting and len(running) < jobs:
            name = next(iter(waiting))
            if running and (waiting[name].alone or parts[running[0].name].alone):
                break
            running.append(Run(name, waiting.pop(name), setup))
        for run in [run for run in running if run.finished()]:
            running.remove(run)
            for line in run.rows.read_text().splitlines() if run.rows.exists() else ():
                yield Row(*json.loads(line))
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.6b")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="few tokens and steps")
    parser.add_argument("--jobs", type=int, default=1, help="parts without measurements at once")
    args = parser.parse_args()
    as_a_component()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(args.size, args.quick, Path(folder))
        print("| what | figure | limit | |\n|---|---|---|---|", flush=True)
        parts = {"begin": Part(begin, 300), **{name: PARTS[name] for name in dict.fromkeys(args.parts)}}
        for row in results(parts, setup, args.jobs):
            verdict = "FAILED" if not row.passed else "ok" if row.limit else ""
            print(f"| {row.what} | {row.figure} | {row.limit} | {verdict} |", flush=True)
            failed += not row.passed
    if failed:
        sys.exit(f"{failed} failed")


if __name__ == "__main__":
    main()
