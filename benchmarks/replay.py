"""Asynchronous runs, half of them under faults, and their replays with one and three generators: equal sha256?

    python benchmarks/replay.py --runs 20 --steps 40

Each run has two generators and `max_policy_age` 4, and keeps the trainer's state of every step. In every second run a
generator or the trainer is killed or stopped every 5 to 10 seconds. A replay must have the same sha256 of weights and
optimiser after every step. Prints one line a run, with the smallest gradient norm: without gradients all would agree.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
ATTEMPTS = 5
VICTIMS = ("generator", "trainer")
SETTINGS = {
    "from_scratch": {"alphabet": "abcdefghijklmnopqrstuvwxyz>", "hidden_size": 32, "layers": 2, "max_positions": 128},
    "dataset": {"task": "apps.toys.words:Reverse", "difficulty": [2, 4], "prompt_template": "{question}>"},
    "grpo": {"n_samples": 8, "max_tokens": 80},
    "reward": {"functions": ["benchmarks.replay:letters"], "accuracy": "ExactMatch"},
    "services": {"generator": {"num_replicas": 2}},
    "async": {"max_policy_age": 4},
    "eval": {"problems": 0},
}


def letters(response: str) -> float:
    """Distinct letters: a reward that differs among the answers of almost every group."""
    return len(set(response)) / 26


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


def strike(run: subprocess.Popen[bytes], metrics: Path, seed: int) -> list[str]:
    """Kill or stop a process of a run every 5 to 10 seconds from its next step to its end; what was done."""
    lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 1
    while run.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") <= lines):
        time.sleep(0.1)
    rng = random.Random(seed)
    faults: list[str] = []
    while True:
        with suppress(subprocess.TimeoutExpired):
            run.wait(rng.uniform(5, 10))
            return faults
        members = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                pid, _, rest = stat.read_text().partition(" (")
                name, _, fields = rest.rpartition(") ")
                state, _, _, session = fields.split()[:4]
                if int(session) == run.pid and state not in "TZ" and name.startswith(VICTIMS):
                    members[int(pid)] = name
        # A generator is left, so that the run goes on.
        if len(members) > 2:
            pid = rng.choice(sorted(members))
            number = rng.choice((signal.SIGKILL, signal.SIGSTOP))
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                faults.append(f"{number.name} {members[pid]}")


def states(folder: Path) -> dict[str, str]:
    """The sha256 of weights and optimiser after each step."""
    return {
        path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("checkpoints/step_*/__0_0.distcp"))
    }


def main() -> None:
    """Run, replay and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    options = parser.parse_args()
    equal = 0
    with tempfile.TemporaryDirectory() as root:
        for number in range(options.first, options.first + options.runs):
            settings = SETTINGS | {
                "seed": number,
                "training": {"batch_size": 4, "steps": options.steps, "learning_rate": 3e-3, "seq_len": 512},
                "generator": {"slots": 4, "on_update": ("continue", "recompute")[number // 2 % 2]},
                "checkpoint": {"every": 1, "keep": options.steps},
                "run": {"name": f"run{number}", "root": root, "overwrite": True},
            }
            config = Path(root) / "config.yaml"
            config.write_text(yaml.safe_dump(settings))
            faults: list[str] = []
            words = [sys.executable, "-m", "forge"]
            folder = Path(root) / f"run{number}"
            output = Path(root) / f"run{number}.log"
            command = [*words, "train", str(config)]
            for attempt in range(ATTEMPTS):
                resume = ["--resume", "auto"] if attempt else []
                with output.open("w") as file:
                    run = subprocess.Popen(
                        [*command, *resume], env=environment(), stdout=file, stderr=file, start_new_session=True
                    )
                    if number % 2:
                        faults += strike(run, folder / "metrics.jsonl", 100 * number + attempt)
                if run.wait() == 0:
                    break
                # A trainer that dies twice as it starts ends the run: it is resumed, as a scheduler would.
                faults.append("resumed")
            else:
                raise SystemExit(f"run {number} did not end in {ATTEMPTS} attempts: {output.read_text()[-2000:]}")
            before = states(folder)
            steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
            samples = [s for line in (folder / "schedule.jsonl").read_text().splitlines() for s in spans(line)]
            mixed = sum(len(versions) > 1 for versions in samples) / len(samples)
            verdicts = []
            for replicas in (1, 3):
                command = [*words, "replay", str(folder), "--replicas", str(replicas)]
                done = subprocess.run(command, env=environment(), capture_output=True, text=True)
                is_equal = done.returncode == 0 and states(Path(root) / f"run{number}-replay") == before
                verdicts.append("equal" if is_equal else f"NOT EQUAL: {done.stdout[-300:]} {done.stderr[-600:]}")
            equal += verdicts == ["equal", "equal"]
            gradient = min(row["train/grad_norm"] for row in steps)
            print(
                f"run {number}: {len(before)} steps, least gradient norm {gradient:.1e}, {mixed:.0%} of samples by "
                f"several versions, faults: {', '.join(faults) or 'none'}; "
                f"with 1 and 3 generators: {', '.join(verdicts)}",
                flush=True,
            )
    print(f"{equal} of {options.runs} runs replayed to equal sha256 at every step")
    if equal < options.runs:
        raise SystemExit(1)


def spans(line: str) -> list[list[list[int]]]:
    """The spans of the samples that a line of a schedule lists."""
    return [sample[1] for group in json.loads(line).get("groups", []) for sample in group[2]]


if __name__ == "__main__":
    main()
