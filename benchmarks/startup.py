"""From the command to the first training step, with forked processes and with processes that import for themselves.

    OMP_NUM_THREADS=1 python benchmarks/startup.py --rounds 5 --model runs/quickstart-warmup/model

Runs `forge train apps/grpo/tiny.yaml` on both sides in turn. Seconds are of wall time from the start of the
program to the metrics of its first step; CPU-seconds are of the whole run of two steps.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def one(model: str, generators: int, fork: str) -> tuple[float, float]:
    """Seconds to the first step, CPU-seconds of the run."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "forge", "train", "apps/grpo/tiny.yaml", "--model", model]
        words += [
            "--run.root",
            folder,
            "--training.steps",
            "2",
            "--training.warmup_steps",
            "1",
            "--eval.every",
            "0",
            "--checkpoint.every",
            "0",
        ]
        words += ["--services.generator.num_replicas", str(generators)]
        environment = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "2000", **os.environ, "FORGE_FORK_SERVER": fork}
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        metrics, seconds = Path(folder) / "quickstart/metrics.jsonl", None
        while process.poll() is None:
            if seconds is None and metrics.exists() and '"step": 1.0' in metrics.read_text():
                seconds = time.perf_counter() - began
            time.sleep(0.02)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if seconds is None or process.returncode:
        raise SystemExit(f"the run ended with {process.returncode}")
    return seconds, used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="runs/quickstart-warmup/model")
    parser.add_argument("--generators", type=int, nargs="+", default=[1, 3])
    args = parser.parse_args()
    print("| processes | | seconds to the first step, median (range) | CPU-seconds, median |\n|---|---|---|---|")
    for generators in args.generators:
        sides: dict[str, list[tuple[float, float]]] = {"0": [], "1": []}
        for _ in range(args.rounds):
            for fork, found in sides.items():
                found.append(one(args.model, generators, fork))
        for fork, name in (("0", "each imports for itself"), ("1", "forked")):
            seconds, cpu = zip(*sides[fork], strict=True)
            wall = f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"
            print(f"| trainer and {generators} generator(s) | {name} | {wall} | {statistics.median(cpu):.1f} |")


if __name__ == "__main__":
    main()
