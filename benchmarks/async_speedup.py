"""What overlap is worth: the same training in lock-step and with rollouts that run ahead.

    make quickstart                                              # leaves the model that it starts from
    OMP_NUM_THREADS=1 python benchmarks/async_speedup.py [--steps 60] [--latency 0.1]

Rewards take a log-normal time, decided by the response, so that there is something to overlap on two cores. G, T and W
are the seconds of generation, training and weight update in a lock-step step, with rewards that take no time; L is how
much longer a lock-step step is with those that do. No schedule is faster than (G + L + T + W) / max(G, T) times
lock-step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parents[1]
LATENCY, SPREAD = "REWARD_LATENCY", 0.5
WARM_UP = 5  # steps that are not counted
UPDATE = ("wall/trainer.push_weights", "wall/generator.update_weights")


async def slow_match(prompt: str, response: str, target: str) -> float:
    """Exact match, after a time that is log-normal over responses: its median is the environment's `REWARD_LATENCY`."""
    from forge.rewards.rules import ExactMatch

    if latency := float(os.environ[LATENCY]):
        await asyncio.sleep(latency * math.exp(SPREAD * random.Random(prompt + response).gauss(0, 1)))
    return ExactMatch()(prompt, response, target)


def train(root: str, name: str, age: int, latency: float, args: argparse.Namespace) -> list[dict[str, float]]:
    settings = {
        "config": "apps/grpo/tiny.yaml",
        "run.root": root,
        "run.name": name,
        "training.steps": args.steps,
        "training.batch_size": args.batch_size,
        "async.max_policy_age": age,
        "reward.functions": "['benchmarks.async_speedup:slow_match']",
        "reward.accuracy": "ExactMatch",
        "generator.slots": args.slots,
        "services.generator.num_replicas": 1,
        "checkpoint.every": 0,
        "eval.problems": 0,
    }
    command = [sys.executable, "-m", "apps.grpo.main"]
    for key, value in settings.items():
        command += [f"--{key}", str(value)]
    environment = os.environ | {LATENCY: str(latency), "GOMP_SPINCOUNT": "2000"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = (Path(root) / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][1:]


def seconds(rows: list[dict[str, float]], *names: str) -> float:
    """Median over steps of the sum of these metrics."""
    return median(sum(row.get(name, 0.0) for name in names) for row in rows[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--slots", type=int, default=8, help="sequences decoded at once: few make generation slow")
    parser.add_argument("--latency", type=float, default=0.12, help="median seconds of a reward")
    parser.add_argument("--ages", type=int, nargs="*", default=[0, 1, 4])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        quick = train(root, "quick", 0, 0.0, args)
        runs = {age: train(root, f"age-{age}", age, args.latency, args) for age in args.ages}
    G = seconds(quick, "wall/replay_buffer.sample")
    T, W = seconds(quick, "wall/trainer.train_step"), seconds(quick, *UPDATE)
    L = seconds(runs[0], "seconds/step") - seconds(quick, "seconds/step")
    bound = (G + L + T + W) / max(G, T)
    print(f"G {G:.3f} s, L {L:.3f} s, T {T:.3f} s, W {W:.3f} s: the bound is {bound:.2f}")
    print("\n| max_policy_age | s a step | speed-up | share of the bound | mean age | reward, last 10 steps |")
    print("|---|---|---|---|---|---|")
    base = mean(row["seconds/step"] for row in runs[0][WARM_UP:])
    for age, rows in runs.items():
        took = mean(row["seconds/step"] for row in rows[WARM_UP:])
        reward, mean_age = (
            mean(row["reward"] for row in rows[-10:] if "reward" in row),
            mean(row["policy_age"] for row in rows),
        )
        speed_up = base / took
        print(f"| {age} | {took:.3f} | {speed_up:.2f} | {speed_up / bound:.0%} | {mean_age:.2f} | {reward:.3f} |")
    accounted = min(
        sum(r["wall/accounted"] * r["seconds/step"] for r in rows) / sum(r["seconds/step"] for r in rows)
        for rows in runs.values()
    )
    print(f"\nphases add up to at least {accounted:.1%} of the wall")


if __name__ == "__main__":
    main()
