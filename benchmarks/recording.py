"""What recording rollouts costs: the share of a step's wall, and CPU-seconds, with metrics.rollouts 1, 8 and all.

    python benchmarks/recording.py [--steps 30] [--repeat 3]

Runs of the same small model with GRPO, one after the other: the settings take turns. The wall is that of what recording
adds to the training loop (choosing groups, fetching the trainer's numbers and dropped groups, writing), as the run
measures its phases, over the duration of the step. CPU-seconds are of all processes, against a run that records
nothing. The first ten steps are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ["0", "1", "8", "all"]
PHASES = ["wall/log_rollouts", "wall/trainer.recorded", "wall/replay_buffer.take_dropped"]
WARM = 10
CONFIG = {
    "from_scratch": {"alphabet": "abcdefghijklmnopqrstuvwxyz>", "hidden_size": 256, "layers": 6, "max_positions": 160},
    "dataset": {"task": "apps.toys.words:Reverse", "difficulty": [30, 60], "prompt_template": "{question}>"},
    "training": {"batch_size": 16, "learning_rate": 1e-4, "seq_len": 4096, "mini_batches": 2},
    "grpo": {"n_samples": 8, "max_tokens": 64, "beta": 0.0},
    "async": {"max_policy_age": 1},
    "reward": {"functions": ["CharacterMatch"], "accuracy": "ExactMatch"},
    "generator": {"slots": 128},
    "services": {"reward": None},
    "eval": {"problems": 0},
}


def run(folder: Path, setting: str, steps: int) -> list[dict[str, float]]:
    """The rows of a run, without the first."""
    path = folder / "config.yaml"
    own = {"run": {"name": "run", "root": str(folder), "overwrite": True}, "metrics": {"rollouts": setting}}
    path.write_text(yaml.safe_dump(CONFIG | own | {"training": CONFIG["training"] | {"steps": steps}}))
    command = [sys.executable, "-m", "forge", "train", str(path), "--metrics.rollouts", setting]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()][WARM:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    rows: dict[str, list[list[dict[str, float]]]] = {setting: [] for setting in SETTINGS}
    sizes = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.repeat):
            for setting in SETTINGS:
                rows[setting].append(run(Path(folder), setting, args.steps))
                sizes[setting] = (Path(folder) / "run/rollouts.arrow").stat().st_size / args.steps / 1e3
    print("| metrics.rollouts | s a step | recording, ms | share of the wall | CPU-s a step | kB a step |")
    print("|---|---|---|---|---|---|")
    for setting, runs in rows.items():
        steps = [row for one in runs for row in one]
        cost = [sum(row.get(name, 0.0) for name in PHASES) for row in steps]
        share = sum(cost) / sum(row["seconds/step"] for row in steps)
        cpu = statistics.median((one[-1]["cpu_seconds"] - one[0]["cpu_seconds"]) / (len(one) - 1) for one in runs)
        wall = statistics.median(row["seconds/step"] for row in steps)
        numbers = f"{wall:.2f} | {statistics.median(cost) * 1e3:.1f} | {share:.2%} | {cpu:.2f} | {sizes[setting]:.0f}"
        print(f"| {setting} | {numbers} |")


if __name__ == "__main__":
    main()
