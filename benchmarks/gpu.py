"""The first minutes on a GPU: parts in the order of their worth, each with its figures and, where there are, limits.

    python benchmarks/gpu.py --minutes 14 --output build/gpu.jsonl   # a model of Qwen3-0.6B's shape, random weights
    python benchmarks/gpu.py --dry-run                               # anywhere: every part, figures without meaning
    python benchmarks/gpu.py --size tiny --parts compile             # on a CPU: a small model, few tokens and steps

Each part is a process of its own with a time limit, and writes each row to the output at once, a JSON object a line. A
second call with the same output continues with the parts that have not ended, those that failed last. A part that
needs more than what remains of the minutes is left out, and named. The script fails if a limit is exceeded.

One environment has what all parts need: `pip install -e '.[data,four-bits,vllm]' trl==1.16.0`, then `pip install
transformers==5.24.0`, beyond vLLM's pin, for the two families. A row names what is missing. `quickstart` goes on from
the warm-up of `python -m apps.sft.main --config apps/sft/tiny.yaml`, and makes it where it is missing. A dry run
computes on the emulated device of the tests, and on the CPU where a part starts programs of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import gpu_exact
import gpu_runs
import gpu_speed
import torch
from gpu_setup import SIZES, Row, Setup, build_model, device_name
from sides import as_a_component

from forge.engines import graphs
from forge.runtime.process import end_with_parent


class Part(NamedTuple):
    """What a process does, the seconds that it needs on a GPU (an estimate; at twice as many it is ended), whether it
    must be alone, and whether it can compute on the emulated device."""

    act: Callable[[Setup], Iterator[Row]]
    need: int
    alone: bool = True
    emulated: bool = True


PARTS = {
    "quickstart": Part(gpu_runs.quickstart, 120, emulated=False),
    "grpo_135m": Part(gpu_runs.grpo_135m, 120, emulated=False),
    "compile": Part(partial(gpu_speed.costs, {"trainer": {}, "trainer, compiled": {"compile": True}}), 90),
    "long_samples": Part(gpu_speed.long_samples, 60),
    "repeat": Part(gpu_exact.repeat, 40, alone=False),
    "adapters": Part(gpu_speed.adapters, 90),
    "moves": Part(gpu_exact.moves, 60, alone=False, emulated=False),
    "lengths": Part(gpu_speed.lengths, 90),
    "qwen3_5": Part(partial(gpu_speed.families, "Qwen3.5-0.8B"), 90),
    "gpt_oss": Part(partial(gpu_speed.families, "gpt-oss"), 60),
    "four_bits": Part(gpu_speed.four_bits, 60),
    "trl": Part(gpu_runs.trl, 150, emulated=False),
    "generation": Part(gpu_speed.generation, 150, emulated=False),
    "correctness": Part(gpu_exact.correctness, 60, alone=False, emulated=False),
    **{f"gradients_{name}": Part(partial(gpu_exact.gradients, name), 90, alone=False) for name in gpu_exact.FAMILIES},
    "weight_sync": Part(gpu_speed.weight_sync, 60),
}


def begin(setup: Setup) -> Iterator[Row]:
    """Write the model, and say on what this runs."""
    parameters = build_model(setup)
    yield Row(f"{device_name(setup)}, torch {torch.__version__}", f"{setup.size}, {parameters / 1e6:.0f}M parameters")


def carry_out(name: str, part: Part, setup: Setup, output: Path, emulate: bool, parent: int) -> None:
    """A part's process: its rows go to the output as they come, and at its end the seconds that it took."""
    os.setpgid(0, 0)  # with what it starts it can be ended
    end_with_parent(parent)
    start = time.monotonic()
    with output.open("a", buffering=1) as file, ExitStack() as stack:
        file.write(json.dumps({"part": name}) + "\n")
        if emulate and part.emulated:
            from tests.emulated import NAME, emulated_rank
            from tests.engines.captured import checked_capture

            stack.enter_context(mock.patch.dict(graphs.CAPTURES, {NAME: checked_capture}))
            stack.enter_context(emulated_rank())
        try:
            for row in part.act(setup):
                file.write(json.dumps({"part": name, **row._asdict(), "passed": bool(row.passed)}) + "\n")
        except Exception as error:
            traceback.print_exc()
            reason = str(error).strip().splitlines() or [""]
            row = Row(name, f"{type(error).__name__}: {reason[0][:160]}", "", False)
            file.write(json.dumps({"part": name, **row._asdict()}) + "\n")
        else:
            file.write(json.dumps({"part": name, "seconds": round(time.monotonic() - start, 1)}) + "\n")


class Run:
    """A part that runs."""

    def __init__(self, name: str, part: Part, setup: Setup, output: Path, emulate: bool, ends: float) -> None:
        self.name, self.output = name, output
        self.ends = min(time.monotonic() + 2 * part.need, ends)
        self.first = len(read_records(output))
        # Forked before this process opens the device: its imports are there at once.
        self.process: Any = get_context("fork").Process(
            target=carry_out, args=(name, part, setup, output, emulate, os.getpid())
        )
        self.process.start()

    def finished(self) -> bool:
        """Whether it has ended; it is ended at its limit."""
        late = time.monotonic() >= self.ends
        if self.process.is_alive() and not late:
            return False
        self.end()
        if late or self.process.exitcode:
            why = "did not end within its limit" if late else f"ended with {self.process.exitcode}"
            with self.output.open("a") as file:
                file.write(json.dumps({"part": self.name, **Row(self.name, why, "", False)._asdict()}) + "\n")
        return True

    def end(self) -> None:
        """End it with all that it started."""
        if self.process.is_alive():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()

    def rows(self) -> Iterator[Row]:
        """What it has found."""
        for record in read_records(self.output)[self.first :]:
            if record["part"] == self.name and "what" in record:
                yield Row(*(record[field] for field in Row._fields))


def read_records(output: Path) -> list[dict[str, Any]]:
    """The lines of an output that were written to their end."""
    lines = output.read_text().splitlines() if output.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def results(
    parts: dict[str, Part], setup: Setup, output: Path, jobs: int = 1, emulate: bool = False, ends: float = math.inf
) -> Iterator[Row]:
    """The rows of all parts, as they end, and of those that an earlier call ended."""
    earlier = read_records(output)
    done = {record["part"] for record in earlier if "seconds" in record and record["part"] in parts}
    begun = {record["part"] for record in earlier}
    yield from (Row(*(r[field] for field in Row._fields)) for r in earlier if r["part"] in done and "what" in r)
    waiting = sorted(parts.keys() - done, key=lambda name: (name in begun, list(parts).index(name)))
    running = list[Run]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                part = parts[waiting[0]]
                if running and not emulate and (part.alone or parts[running[0].name].alone):
                    break
                name = waiting.pop(0)
                remaining = ends - time.monotonic()
                if part.need <= remaining:
                    running.append(Run(name, part, setup, output, emulate, ends))
                else:
                    yield Row(name, f"left out: needs {part.need} s, {max(0, remaining):.0f} s remain")
            for run in [run for run in running if run.finished()]:
                running.remove(run)
                yield from run.rows()
            time.sleep(0.1)
    finally:
        for run in running:
            run.end()


def main(about: str | None, all_parts: dict[str, Part], minutes: float = math.inf) -> None:
    """Run the parts that the command line asks for."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.6b")
    parser.add_argument("--parts", nargs="+", choices=all_parts, default=list(all_parts))
    parser.add_argument("--minutes", type=float, default=minutes, help="from the start of this process")
    parser.add_argument("--output", type=Path, help="file of the rows, and of the parts that have ended")
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter of an environment with TRL")
    parser.add_argument("--jobs", type=int, default=1, help="parts without measurements at once")
    parser.add_argument("--dry-run", action="store_true", help="--size tiny --jobs 2 on the emulated device")
    args = parser.parse_args()
    as_a_component()
    # The minutes count from when the kernel started this process, in ticks after its own start.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK") - time.clock_gettime(time.CLOCK_BOOTTIME) + time.monotonic()
    if args.dry_run:
        args.size, args.jobs = "tiny", 2
        sys.path[:0] = [str(Path(__file__).parents[1])]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(args.size, Path(folder), args.trl_python)
        output = args.output or Path(folder) / "rows.jsonl"
        output.parent.mkdir(parents=True, exist_ok=True)
        print("| what | figure | limit | |\n|---|---|---|---|", flush=True)
        parts = {name: part for name, part in all_parts.items() if name in args.parts}
        ends = started + 60 * args.minutes
        for found in (
            results({"begin": Part(begin, 150)}, setup, Path(folder) / "begin.jsonl"),
            results(parts, setup, output, args.jobs, args.dry_run, ends),
        ):
            for row in found:
                verdict = "FAILED" if not row.passed else "ok" if row.limit else ""
                print(f"| {row.what} | {row.figure} | {row.limit} | {verdict} |", flush=True)
                failed += not row.passed
    if failed:
        sys.exit(f"{failed} failed")


if __name__ == "__main__":
    main(__doc__, PARTS)
