"""The quickstart's GRPO run with a random fault every few seconds: it must end as a run without faults does.

    make quickstart                                    # leaves the model that it starts from
    python benchmarks/soak.py                          # ten minutes of faults
    python benchmarks/soak.py --every 0 0              # the same run without faults

A fault is SIGKILL or SIGSTOP to a random process that the run has started: generators, trainer, reward. Afterwards the
run's own records are checked: every step once, every group of completions trained once and whole, and the held-out
accuracy.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from forge.api import Result
from forge.controller import first_to_end, runtime
from forge.recipes.launch import launch
from forge.recipes.rl import train as grpo
from forge.recipes.rl_config import RLConfig as GRPOConfig
from forge.training import checkpoint

SIGNALS = (signal.SIGKILL, signal.SIGSTOP)


async def faults(every: tuple[float, float], seed: int, done: collections.Counter) -> None:
    """Hit one process after another, for as long as the run lasts."""
    rng = random.Random(seed)
    while True:
        await asyncio.sleep(rng.uniform(*every))
        processes = {
            pid: service.status().name
            for service in runtime().services.values()
            for replica in service.status().replicas
            for pid in replica.pids
            if replica.state == "up"
        }
        if processes:
            pid = rng.choice(sorted(processes))
            number = rng.choice(SIGNALS)
            os.kill(pid, number)
            done[f"{number.name} {processes[pid]}"] += 1


async def soak(every: tuple[float, float], seed: int, done: collections.Counter, *args: Any) -> None:
    await (first_to_end(grpo(*args), faults(every, seed, done)) if any(every) else grpo(*args))


def check(folder: Path, steps: int, batch_size: int, samples: int) -> tuple[int, list[str]]:
    """Groups that were dropped, and the faults of a run's records.

    A group that a fault delayed until it was too old is dropped, counted, and replaced by one of a new number.
    """
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rollouts = Result(folder).rollouts
    indices = [rollout["index"] for rollout in rollouts]
    buffer = checkpoint.extra(checkpoint.checkpoints(folder / "checkpoints")[-1])["buffer"]
    dropped = buffer["dropped"]["too_old"] + buffer["dropped"]["unscored"]
    checks = {
        "steps are missing or doubled": [row["step"] for row in rows] == list(range(steps + 1)),
        "a group trained twice": len(indices) == len(set(indices)) == steps * batch_size,
        "a group is missing that was not dropped": len(set(range(max(indices) + 1)) - set(indices)) == dropped,
        "groups are not whole": all(len(rollout["rewards"]) == samples for rollout in rollouts),
        "a group is older than allowed": all(row.get("policy_age/max", 0) <= 1 for row in rows),
    }
    return dropped, [name for name, right in checks.items() if not right]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=float, nargs=2, default=(5.0, 10.0), help="seconds from fault to fault")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    batch_size, done, start = 128, collections.Counter[str](), time.monotonic()
    name = f"soak-{args.seed}-{'faults' if any(args.every) else 'calm'}"
    settings = {
        "config": ROOT / "apps/grpo/tiny.yaml",
        "run.name": name,
        "training.steps": args.steps,
        "training.batch_size": batch_size,
        "checkpoint.every": 10,
        "metrics.rollouts": batch_size,
        "seed": args.seed,
        # These deaths are no request's doing: two of them around one request are bad luck.
        **{f"services.{name}.quarantine_after": 4 for name in ("generator", "trainer", "reward")},
    }
    argv = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    launch(partial(soak, tuple(args.every), args.seed, done), GRPOConfig, argv)
    dropped, wrong = check(ROOT / "runs" / name, args.steps, batch_size, samples=8)
    print(f"{sum(done.values())} faults in {time.monotonic() - start:.0f} s: {dict(sorted(done.items()))}")
    print(f"{args.steps} steps; {dropped} groups dropped, counted and replaced")
    raise SystemExit("; ".join(wrong) or 0)
