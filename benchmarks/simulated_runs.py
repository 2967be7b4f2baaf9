"""The simulator against real runs: step seconds of held-out settings, predicted from the traces of three others.

    make quickstart                                              # leaves the model that the runs start from
    OMP_NUM_THREADS=1 python -m benchmarks.simulated_runs --runs build/simulated
    python -m benchmarks.simulated_runs --published benchmarks/published_pairs.tsv

Three lock-step runs with quick rewards give all durations: of a decode step, of a training step, and of the rest. The
other settings differ from them in `async.max_policy_age`, batch, samples, slots, weight updates and the reward's
latency, which is a setting of the run as much as of the simulation. Nothing is fitted to them. A run whose training
took half as long again as its CPU time was disturbed by other processes: the same command does those again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from benchmarks.simulated_tables import published
from forge.observability.runs import rows
from forge.recipes.simulate import SimulationSettings, simulate
from forge.recipes.simulate.traces import settings_of_runs

ROOT = Path(__file__).resolve().parents[1]
LATENCY = "REWARD_LATENCY"
SPREAD = 0.5  # of a reward's log-normal time, see benchmarks/async_speedup.py
STEPS = 16
WARM_UP = 4  # steps that are not counted
DISTURBED = 1.5  # slowness beyond which a run is done again: durations of a shared machine are of no setting


class Setting(NamedTuple):
    """What differs between the runs; `latency` is the median of a reward's seconds."""

    age: int
    batch_size: int
    n_samples: int
    slots: int
    latency: float
    interval: int = 1

    @property
    def name(self) -> str:
        return "-".join(map(str, self)).replace(".", "_")


CALIBRATION = [Setting(0, 16, 8, 16, 0.0), Setting(0, 64, 8, 16, 0.0), Setting(0, 32, 8, 128, 0.0)]


def held_out(count: int) -> list[Setting]:
    """Settings drawn from a grid, always the same; none is of the calibration."""
    grid = itertools.product((0, 1, 2, 4), (16, 32, 48), (4, 8, 16), (8, 32, 64), (0.0, 0.3, 0.6, 1.0), (1, 2))
    settings = [Setting(*values) for values in grid]
    settings = [setting for setting in settings if setting.age >= setting.interval - 1]
    return random.Random(0).sample(settings, count)


def train(folder: Path, model: str, setting: Setting) -> None:
    """Run a setting, unless the folder has a run of it that nothing disturbed."""
    if (folder / setting.name / "finished").exists() and slowness(folder / setting.name) < DISTURBED:
        return
    options = {
        "config": "apps/grpo/tiny.yaml",
        "model": model,
        "run.root": folder,
        "run.name": setting.name,
        "run.overwrite": "true",
        "dataset.difficulty": "[2, 12]",
        "training.steps": STEPS,
        "training.batch_size": setting.batch_size,
        "training.sync_interval": setting.interval,
        "async.max_policy_age": setting.age,
        "grpo.n_samples": setting.n_samples,
        "grpo.max_tokens": 18,
        "reward.functions": "['benchmarks.async_speedup:slow_match']",
        "reward.accuracy": "ExactMatch",
        "generator.slots": setting.slots,
        "checkpoint.every": 0,
        "eval.problems": 0,
        "eval.every": 0,
        "metrics.rollouts": "all",
    }
    command = [sys.executable, "-m", "apps.grpo.main"]
    for key, value in options.items():
        command += [f"--{key}", str(value)]
    environment = os.environ | {LATENCY: str(setting.latency)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)


def slowness(folder: Path) -> float:
    """Seconds of training over its CPU seconds: beyond 1, other processes used the machine."""
    steps = [row for row in rows(folder) if row["step"] > WARM_UP]
    return sum(row["wall/trainer.train_step"] for row in steps) / sum(row["cpu_seconds/trainer"] for row in steps)


def predicted(durations: SimulationSettings, setting: Setting) -> SimulationSettings:
    """What is simulated: durations of the calibration, with the settings of a run."""
    changes = {
        "steps": STEPS,
        "batch_size": setting.batch_size,
        "n_samples": setting.n_samples,
        "max_policy_age": setting.age,
        "sync_interval": setting.interval,
        "generators": durations.generators.model_copy(update={"slots": setting.slots}),
        "rewards": durations.rewards.model_copy(update={"seconds": setting.latency, "spread": SPREAD}),
    }
    return durations.model_copy(update=changes)


def compare(folder: Path, settings: list[Setting]) -> None:
    """Print real and simulated seconds of a step, and the errors' median."""
    durations = settings_of_runs([folder / setting.name for setting in CALIBRATION])
    head = ["age", "batch x n", "slots", "latency", "interval", "real s/step", "simulated", "error"]
    head += ["age, real", "simulated", "wall over CPU"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    errors: dict[bool, list[float]] = {False: [], True: []}
    for setting in settings:
        steps = [row for row in rows(folder / setting.name) if row["step"] > WARM_UP]
        real = mean(row["seconds/step"] for row in steps)
        result = simulate(predicted(durations, setting))
        seconds = result.steps[-1].seconds - result.steps[WARM_UP].seconds
        simulated = seconds / (STEPS - WARM_UP)
        error = simulated / real - 1
        errors[setting.latency > 0].append(abs(error))
        slow = slowness(folder / setting.name)
        ages = f"{mean(row['policy_age'] for row in steps):.2f} | {mean(age for age, _ in result.ages[WARM_UP:]):.2f}"
        print(
            f"| {setting.age} | {setting.batch_size} x {setting.n_samples} | {setting.slots} | {setting.latency:g} "
            f"| {setting.interval} | {real:.3f} | {simulated:.3f} | {error:+.0%} | {ages} | {slow:.1f} |"
        )
    for slow_rewards, values in errors.items():
        kind = "slow" if slow_rewards else "quick"
        if values:
            print(
                f"{len(values)} settings with {kind} rewards: median error {median(values):.1%}, max {max(values):.0%}"
            )
    print(f"all: median error {median([*errors[False], *errors[True]]):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="where the runs are, or will be")
    parser.add_argument("--model", default="runs/quickstart-warmup/model")
    parser.add_argument("--count", type=int, default=30, help="held-out settings")
    parser.add_argument("--parallel", type=int, default=1, help="runs at once")
    parser.add_argument("--published", type=Path, help="a table of published synchronous and asynchronous runs")
    args = parser.parse_args()
    if args.runs is not None:
        settings = held_out(args.count)
        for setting in CALIBRATION:
            train(args.runs, args.model, setting)
        with ThreadPoolExecutor(args.parallel) as pool:
            list(pool.map(partial(train, args.runs, args.model), settings))
        compare(args.runs, settings)
    if args.published is not None:
        print(published(args.published))


if __name__ == "__main__":
    main()
