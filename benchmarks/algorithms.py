"""Every algorithm on the quickstart's task, from the same start and with the same number of generated tokens.

    python benchmarks/algorithms.py --start runs/quickstart-warmup/model --teacher runs/quickstart/model \
        --results runs/algorithms.jsonl --picture docs/algorithms.png

Runs `apps/grpo` for each algorithm and seed, one after the other, and leaves out what `--results` already holds. Prints
the table of docs/algorithms.md: held-out accuracy (greedy) before and when the budget was spent, mean and range over
seeds, and CPU-seconds of everything.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
from quickstart import ROOT, cpu_seconds

matplotlib.use("Agg")
from matplotlib import pyplot

BUDGET = 187_000  # generated tokens, evaluation not counted
SHARED = {
    "training.steps": 30,
    "training.learning_rate": 1e-4,
    "training.schedule": "constant",
    "checkpoint.every": 0,
    "eval.every": 5,
}
# What differs from an algorithm's own defaults, and why it has to on so small a task.
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {},
    "dapo": {"training.steps": 24},  # its replaced prompts count
    "gspo": {"grpo.clip_low": 0.1, "grpo.clip_high": 0.15},  # means over six tokens vary more than over thousands
    "cispo": {},
    "sapo": {},
    "rloo": {},
    # With the mean of the batch as its baseline it falls apart at this rate (at 5e-5 it does not).
    "reinforce": {"grpo.loss": "{baseline: none, clip_ratio: 1.0}"},
    "reinforce++": {},
    "ppo": {"critic.learning_rate": 1e-3},  # as far above the policy's as its head is below it
    "decoupled_ppo": {"training.mini_batches": 2},
    "distill": {},
}


def one(algorithm: str, seed: int, start: Path, teacher: Path) -> dict[str, Any]:
    settings = SHARED | SETTINGS[algorithm] | {"algorithm": algorithm, "seed": seed, "model": start}
    if algorithm == "distill":
        settings["grpo.reference"] = teacher
    environment = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "2000", **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "apps.grpo.main", "--config", "apps/grpo/tiny.yaml", "--run.root", folder]
        for name, value in settings.items():
            command += [f"--{name}", "null" if value is None else str(value)]
        before = cpu_seconds()
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        rows = [json.loads(line) for line in Path(folder, "quickstart/metrics.jsonl").read_text().splitlines()]
    return {"algorithm": algorithm, "seed": seed, "cpu": cpu_seconds() - before, "curve": curve(rows)}


def curve(rows: list[dict[str, float]]) -> list[tuple[float, float]]:
    """Held-out accuracy by sampled tokens that were trained on."""
    tokens, points = 0.0, []
    for row in rows:
        tokens += row.get("generation/tokens", 0.0)
        if "eval/accuracy" in row:
            points.append((tokens, row["eval/accuracy"]))
    return points


def at_budget(points: list[tuple[float, float]]) -> float:
    """Accuracy of the last evaluation within the budget."""
    return [accuracy for tokens, accuracy in points if tokens <= BUDGET][-1]


def draw(path: Path, runs: dict[str, list[dict[str, Any]]]) -> None:
    figure, axes = pyplot.subplots(3, 4, figsize=(11, 7), sharex=True, sharey=True)
    for axis, (name, found) in zip(axes.flat, runs.items(), strict=False):
        for run in found:
            axis.plot([t / 1e3 for t, _ in run["curve"]], [a for _, a in run["curve"]], lw=1.2)
        axis.axvline(BUDGET / 1e3, color="grey", lw=0.7, ls=":")
        axis.set_title(name, fontsize=9)
        axis.set_ylim(0.3, 1.0)
        axis.grid(alpha=0.3)
    figure.supxlabel("thousand tokens generated", fontsize=9)
    figure.supylabel("held-out accuracy (greedy)", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--algorithms", nargs="+", default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    done = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    for seed in args.seeds:
        for algorithm in args.algorithms:
            if not any((run["algorithm"], run["seed"]) == (algorithm, seed) for run in done):
                done.append(one(algorithm, seed, args.start.resolve(), args.teacher.resolve()))
                with args.results.open("a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
    runs = {name: [run for run in done if run["algorithm"] == name] for name in args.algorithms}
    print("| algorithm | before | after | range | CPU-seconds |\n|---|---|---|---|---|")
    for name, found in runs.items():
        after = [at_budget(run["curve"]) for run in found]
        before = statistics.mean(run["curve"][0][1] for run in found)
        cpu = statistics.median(run["cpu"] for run in found)
        print(
            f"| {name} | {before:.3f} | {statistics.mean(after):.3f} | {min(after):.3f}-{max(after):.3f} | {cpu:.0f} |"
        )
    if args.picture:
        draw(args.picture, runs)


if __name__ == "__main__":
    main()
