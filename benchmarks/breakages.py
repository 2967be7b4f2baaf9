"""Breaks runs of the quickstart in 20 ways, and asks `forge compare` which of them it names by step 20.

    python benchmarks/breakages.py --folder runs/breakages

Each way has a seed of its own, which the reference has not seen, and a healthy run of that seed: none of these may be
outside of a band. Of `apps/grpo/tiny.yaml`, from the model that `apps/sft/tiny.yaml` leaves behind.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from forge.algorithms import GRPO
from forge.rewards.rules import CharacterMatch
from forge_inspect.reference import shipped_references
from forge_inspect.runs import read_metric_rows

ROOT = Path(__file__).parents[1]
STEP = 20
FIRST_SEED = 100
ALGORITHM, REWARD = "--algorithm=benchmarks.breakages:", "--reward.functions=[benchmarks.breakages:"

# By what is broken, the options of the run.
BREAKAGES = {
    "learning rate times 10": ["--training.learning_rate=3e-3"],
    "learning rate divided by 30": ["--training.learning_rate=1e-5"],
    "sign of the reward": [f"{REWARD}negate_reward]"],
    "random reward": [f"{REWARD}draw_reward]"],
    "reward of the prompt instead of the target": [f"{REWARD}reward_prompt]"],
    "reward divided by 10": [f"{REWARD}shrink_reward]"],
    "sign of the advantages": [f"{ALGORITHM}NegatedAdvantages"],
    "advantages of other samples": [f"{ALGORITHM}ShiftedAdvantages"],
    "advantages without a mean": [f"{ALGORITHM}RawRewards"],
    "wrong mask: every second token": [f"{ALGORITHM}EverySecondToken"],
    "half of the batch dropped": ["--training.batch_size=64"],
    "stale weights": ["--training.sync_interval=5", "--async.max_policy_age=4"],
    "template without its last character": ["--dataset.prompt_template={question}"],
    "longer words": ["--dataset.difficulty=[6,6]"],
    "temperature 2": ["--grpo.temperature=2.0"],
    "temperature 0.3": ["--grpo.temperature=0.3"],
    "two samples a prompt": ["--grpo.n_samples=2"],
    "completions cut": ["--grpo.max_tokens=3"],
    "eight updates a step": ["--training.mini_batches=8"],
    "entropy bonus": ["--training.entropy_coef=0.3"],
}


def negate_reward(response: str, target: str) -> float:
    return -CharacterMatch()("", response, target)


def draw_reward(response: str, target: str) -> float:
    return random.Random(response).random()


def reward_prompt(prompt: str, response: str) -> float:
    return CharacterMatch()("", response, prompt.rstrip(">"))


def shrink_reward(response: str, target: str) -> float:
    return 0.1 * CharacterMatch()("", response, target)


@dataclass(eq=False)
class NegatedAdvantages(GRPO):
    def advantages(self, rewards):
        return [[-value for value in group] for group in super().advantages(rewards)]


@dataclass(eq=False)
class ShiftedAdvantages(GRPO):
    def advantages(self, rewards):
        return [[*group[1:], group[0]] for group in super().advantages(rewards)]


@dataclass(eq=False)
class RawRewards(GRPO):
    def advantages(self, rewards):
        return [list(group) for group in rewards]


@dataclass(eq=False)
class EverySecondToken(GRPO):
    def token_loss(self, ratio, logprobs, advantages, positions):
        return super().token_loss(ratio, logprobs, advantages * (positions % 2))


def run_program(folder: Path, program: str, seed: int, *options: str, run: str | None = None) -> None:
    """Run an app in a folder, with its output in a file: to its end, or until the run of this name has made `STEP`."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    command = [sys.executable, "-m", f"apps.{program}.main", "--config", f"apps/{program}/tiny.yaml"]
    with (folder / f"{program}.log").open("a") as output:
        process = subprocess.Popen(
            [*command, "--seed", str(seed), *options],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        while process.poll() is None:
            time.sleep(1.0)
            if run is not None and len(read_metric_rows(folder / "runs" / run)) > STEP:
                os.killpg(process.pid, signal.SIGTERM)
                break
        code = process.wait()
    if code and (run is None or not read_metric_rows(folder / "runs" / run)):
        raise RuntimeError(f"{program} of seed {seed} ended with {code}: see {folder}")


def train_grpo(folder: Path, seed: int, name: str, options: list[str]) -> list[dict[str, float]]:
    """Return the rows of a run's first `STEP` steps, trained first unless it is there: fewer if it reached its goal."""
    place = folder / str(seed)
    place.mkdir(parents=True, exist_ok=True)
    if not (place / "apps").exists():
        (place / "apps").symlink_to(ROOT / "apps")
    if not (place / "runs/quickstart-warmup/finished").exists():
        run_program(place, "sft", seed)

    # Not a shorter run, whose learning rate would fall faster.
    run = place / "runs" / name
    if len(read_metric_rows(run)) <= STEP and not (run / "finished").exists():
        run_program(place, "grpo", seed, f"--run.name={name}", *options, run=name)
    return [row for row in read_metric_rows(run) if row["step"] <= STEP]


def compare_seed(folder: Path, index: int) -> str:
    """Train a healthy and a broken run of a seed, and return what the reference says of both."""
    seed, (what, options) = FIRST_SEED + index, list(BREAKAGES.items())[index]
    # A warm-up may reach the goal of GRPO by itself: another seed.
    while len(healthy := train_grpo(folder, seed, "healthy", [])) <= STEP:
        seed += len(BREAKAGES)

    (reference,) = (reference for reference in shipped_references() if reference.name == "grpo/tiny")
    found = [reference.list_departures(rows) for rows in (healthy, train_grpo(folder, seed, "broken", options))]
    texts = [f"{len(departures)} ({departures[0]})" if departures else "none" for departures in found]
    return f"{what}: {texts[1]}; healthy: {texts[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--parallel", type=int, default=2)
    args = parser.parse_args()
    with ThreadPoolExecutor(args.parallel) as pool:
        for line in pool.map(lambda index: compare_seed(args.folder.resolve(), index), range(len(BREAKAGES))):
            print(line, flush=True)


if __name__ == "__main__":
    main()
