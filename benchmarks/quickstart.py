"""The quickstart over several seeds: what a user should see, as a table and a picture.

    python benchmarks/quickstart.py --seeds 0 1 2 --picture docs/quickstart.png

Runs `apps.quickstart` for each seed, as `make quickstart` does, and reports held-out accuracy before and after GRPO,
wall seconds and CPU-seconds of both stages, start-up included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).parents[1]


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def one(seed: int, folder: Path) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Both stages for one seed."""
    environment = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "2000", **os.environ}
    wall, cpu = time.perf_counter(), cpu_seconds()
    command = [sys.executable, "-m", "apps.quickstart", "--seed", str(seed), "--run.root", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    rows = [json.loads(line) for line in (folder / "quickstart/metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if "eval/accuracy" in row]
    return {
        "seed": seed,
        "before": evaluated[0]["eval/accuracy"],
        "after": evaluated[-1]["eval/accuracy"],
        "wall s": time.perf_counter() - wall,
        "CPU s": cpu_seconds() - cpu,
    }, rows


def draw(path: Path, runs: dict[int, list[dict[str, float]]]) -> None:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.4))
    for seed, rows in runs.items():
        evaluated = [row for row in rows if "eval/accuracy" in row]
        left.plot(
            [r["step"] for r in evaluated], [r["eval/accuracy"] for r in evaluated], "o-", ms=3, label=f"seed {seed}"
        )
        sampled = [row for row in rows if "reward" in row]
        right.plot([r["step"] for r in sampled], [r["reward"] for r in sampled], lw=1, label=f"seed {seed}")
    for axis, title in ((left, "held-out accuracy (greedy)"), (right, "reward (sampled)")):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("GRPO step")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/quickstart.png")
    arguments = parser.parse_args()
    runs, table = {}, []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            row, runs[seed] = one(seed, Path(folder))
        table.append(row)
    draw(arguments.picture, runs)
    print("| " + " | ".join(table[0]) + " |\n|" + "---|" * len(table[0]))
    for row in table:
        cells = [f"{v:.3f}" if name in ("before", "after") else f"{v:.0f}" for name, v in row.items()]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
