"""A lock-step GRPO run is killed at random moments and resumed until it has finished, as if nothing had happened.

    python benchmarks/resume.py                        # 20 runs, kill -9 of every process of each, up to three times

The same command, with `--resume auto`, is started again after each kill. Kills come at a random time, during start-up,
as soon as a checkpoint is being written, or during the export. Compared with a run without kills: the exported weights
bit by bit, the steps in metrics.jsonl, and the groups that were trained.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
from forge.observability.rollouts import read_batches, texts_by_group

CONFIG = {
    "from_scratch": {"alphabet": "abcdefghijklmnopqrstuvwxyz>", "hidden_size": 32, "layers": 2, "heads": 2},
    "dataset": {"task": "apps.toys.words:Reverse", "difficulty": [2, 4], "prompt_template": "{question}>"},
    "training": {"batch_size": 4, "steps": 8, "learning_rate": 1e-3, "schedule": "cosine", "seq_len": 256},
    "grpo": {"n_samples": 4, "max_tokens": 8},
    "async": {"max_policy_age": 0},
    "reward": {"functions": ["CharacterMatch"], "accuracy": "ExactMatch"},
    "generator": {"slots": 16},
    "services": {"generator": {"num_replicas": 2}},
    "checkpoint": {"every": 2},
    "eval": {"problems": 8, "every": 4},
    "metrics": {"rollouts": 4},
}
KINDS = ("any time", "start-up", "checkpoint", "export")
# What a kill of these kinds waits for: the folder that is there meanwhile.
TRACES = {"checkpoint": "checkpoints/step_*.unfinished", "export": "model.unfinished"}


@dataclass
class Result:
    """How a run ended: what it left, and what it went through."""

    digest: str
    steps: list[int]
    groups: list[int]
    seconds: float
    kills: list[str] = field(default_factory=list)


class Case:
    """One run in a folder of its own."""

    def __init__(self, folder: Path, name: str, overrides: list[str]) -> None:
        self.run = folder / name
        config = folder / f"{name}.yaml"
        config.write_text(yaml.safe_dump(CONFIG | {"run": {"name": name, "root": str(folder)}}))
        module = ["-m", "apps.grpo.main", "--config", str(config), "--resume", "auto"]
        self.command = [sys.executable, *module, *overrides]
        self.log = folder / f"{name}.log"

    def until_killed(self, kind: str | None, seconds: float) -> str | None:
        """Start it, and kill it; None if it came to its end before."""
        with self.log.open("a") as log:
            process = subprocess.Popen(self.command, cwd=ROOT, stdout=log, stderr=log)
        began, started = time.monotonic(), time.time()
        while process.poll() is None:
            late = time.monotonic() - began > seconds
            if kind is not None and late and (kind not in TRACES or self._writes(TRACES[kind], started)):
                step = len(self._rows("metrics.jsonl")) - 1
                kill_all(process)
                when = f"step {step}" if step >= 0 else "before step 0"
                return f"{kind} ({time.monotonic() - began:.1f} s, {when})"
            time.sleep(0.001 if kind in TRACES else 0.01)
        if process.returncode:
            raise SystemExit(f"{' '.join(self.command)} failed:\n{self.log.read_text()[-3000:]}")
        return None

    def _writes(self, pattern: str, since: float) -> bool:
        """A folder of this kind is there, and is not left from an earlier kill."""
        try:
            return any(path.stat().st_ctime > since for path in self.run.glob(pattern))
        except FileNotFoundError:
            return False

    def result(self, seconds: float, kills: list[str]) -> Result:
        digest = hashlib.sha256((self.run / "model/model.safetensors").read_bytes()).hexdigest()
        steps = [int(row["step"]) for row in self._rows("metrics.jsonl")]
        found = [line for _, batch in read_batches(self.run / "rollouts.arrow") for line in texts_by_group(batch)]
        groups = sorted(row["index"] for row in found)
        return Result(digest, steps, groups, seconds, kills)

    def _rows(self, name: str) -> list[dict]:
        path = self.run / name
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]


def kill_all(process: subprocess.Popen) -> None:
    """SIGKILL to the controller and every component. The shells that remove folders after a kill do their work."""
    found, new = [process.pid], [process.pid]
    while new:
        lists = (path for pid in new for path in Path(f"/proc/{pid}/task").glob("*/children"))
        new = [int(child) for path in lists for child in path.read_text().split()]
        found += [pid for pid in new if Path(f"/proc/{pid}/comm").read_text().strip() != "sh"]
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def resumed(case: Case, rng: random.Random, kinds: list[str], whole: float) -> Result:
    """Kill it once for each of these kinds, then let it finish."""
    kills: list[str] = []
    began = time.monotonic()
    for kind in kinds:
        first = {"any time": rng.uniform(0, 0.8 * whole), "start-up": rng.uniform(0, 0.5 * whole)}.get(kind, 0.0)
        killed = case.until_killed(kind, first)
        if killed is None:
            break
        kills.append(killed)
    case.until_killed(None, 0.0)
    return case.result(time.monotonic() - began, kills)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs=argparse.REMAINDER, help="further settings of the run, --a.b VALUE")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    rng, folder, wrong = random.Random(args.seed), Path(tempfile.mkdtemp(prefix="forge-resume-")), 0
    calm = resumed(Case(folder, "calm", args.overrides), rng, [], 0.0)
    print("| run | killed | resumes | seconds | sha256 of model.safetensors | steps and groups |")
    print("|---|---|---|---|---|---|")
    print(
        f"| without kills | - | 0 | {calm.seconds:.0f} | {calm.digest[:16]} | {len(calm.steps)}, {len(calm.groups)} |"
    )
    for number in range(args.runs):
        kinds = [KINDS[number % len(KINDS)], *rng.choices(KINDS, k=rng.randint(0, 2))]
        result = resumed(Case(folder, f"run-{number}", args.overrides), rng, kinds, calm.seconds)
        once = result.steps == calm.steps and result.groups == calm.groups
        wrong += not once or result.digest != calm.digest
        print(
            f"| {number} | {'; '.join(result.kills) or 'never'} | {len(result.kills)} | {result.seconds:.0f} "
            f"| {result.digest[:16]}{'' if result.digest == calm.digest else ' DIFFERS'} "
            f"| {'as without' if once else 'DIFFER'} |",
            flush=True,
        )
    if wrong:
        raise SystemExit(f"{wrong} of {args.runs} runs differ; see {folder}")
    shutil.rmtree(folder)
