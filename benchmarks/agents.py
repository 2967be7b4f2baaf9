"""Held-out success of apps/tools and apps/code over seeds, each from demonstrations through warm-up to RL.

    python benchmarks/agents.py --seeds 3 --out docs/agents.png

Prints a table and, with --out, draws the curves. Runs are left in runs/agents-*; those that are finished are not made
again.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

APPS = ("tools", "code")


def make(app: str, seed: int, steps: list[str]) -> float:
    """Run an app from its demonstrations on; the seconds that it took."""
    name = f"agents-{app}-{seed}"
    rows, clock = f"runs/{name}-demonstrations.jsonl", Path(f"runs/{name}/seconds")
    if clock.exists():
        return float(clock.read_text())
    began = time.monotonic()
    common = ["--seed", str(seed), "--run.overwrite", "true"]
    warmup = ["--config", f"apps/{app}/warmup.yaml", "--run.name", f"{name}-warmup", "--dataset.path", rows]
    train = ["--config", f"apps/{app}/tiny.yaml", "--run.name", name, "--model", f"runs/{name}-warmup/model"]
    for command in (
        [f"apps.{app}.demonstrate", rows, "--seed", str(seed)],
        ["apps.sft.main", *warmup, *common],
        [f"apps.{app}.main", *train, *common, *steps],
    ):
        subprocess.run([sys.executable, "-m", *command], check=True)
    clock.write_text(str(time.monotonic() - began))
    return float(clock.read_text())


def curve(app: str, seed: int) -> tuple[list[float], list[float]]:
    """Steps, and held-out success at each."""
    rows = map(json.loads, Path(f"runs/agents-{app}-{seed}/metrics.jsonl").read_text().splitlines())
    points = [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]
    return [step for step, _ in points], [success for _, success in points]


def draw(seeds: int, out: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(APPS), figsize=(9, 3.2), sharey=True)
    for panel, app in zip(panels, APPS, strict=True):
        for seed in range(seeds):
            panel.plot(*curve(app, seed), marker="o", markersize=3, label=f"seed {seed}")
        panel.set(title=f"apps/{app}", xlabel="step", ylim=(0, 1))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("held-out success")
    panels[0].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--apps", nargs="+", choices=APPS, default=APPS)
    parser.add_argument("--out")
    parser.add_argument("more", nargs="*", help="further settings of the RL runs, after --")
    arguments = parser.parse_args()
    print("| app | seed | before | after | best | minutes in all |\n|---|---|---|---|---|---|")
    for app in arguments.apps:
        for seed in range(arguments.seeds):
            seconds = make(app, seed, arguments.more)
            _, success = curve(app, seed)
            figures = f"{success[0]:.3f} | {success[-1]:.3f} | {max(success):.3f} | {seconds / 60:.1f}"
            print(f"| {app} | {seed} | {figures} |", flush=True)
    if arguments.out:
        draw(arguments.seeds, arguments.out)


if __name__ == "__main__":
    main()
