"""A bad day: asynchronous GRPO of the quickstart's size, with a random fault every few seconds for a given time.

    make quickstart                                    # leaves the model that it starts from
    python benchmarks/soak.py                          # ten minutes
    python benchmarks/soak.py --hours 1
    python benchmarks/soak.py --every 0 0              # without faults

Faults, drawn at random: SIGKILL or SIGSTOP to a process that a component lives in, SIGKILL to the server that forks
them, SIGTERM to all processes (the run saves itself and is resumed), SIGKILL to all (it is resumed from its newest
checkpoint), eight busy processes for ten seconds. The reward itself ends its process, prints, or leaves threads behind
now and then. Afterwards the run's own records are checked: every step once, every group of completions trained once and
whole, or counted; and memory, descriptors and shared memory of the run did not grow.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from forge.recipes.result import Result
from forge.training import checkpoint

BATCH, SAMPLES = 128, 8
SAVED = 75  # exit code of a run that has saved itself
CHANCE = 4e-6  # that a call of the reward ends its process
HELPERS = ("sh", "forge-launcher")
MARK = "FORGE_SOAK"  # variable of all processes of the run, also of those whose parent was killed
# A fault and its weight: those that end the whole run cost half a minute each.
KINDS = {"SIGKILL": 6, "SIGSTOP": 4, "fork server": 1, "busy": 2, "SIGTERM to all": 1, "SIGKILL to all": 1}
Sample = dict[str, float]


def misbehaving(prompt: str, response: str, target: str) -> float:
    """The share of right letters, by a reward that now and then does what rewards do."""
    draw = random.random()
    if draw < CHANCE:
        os._exit(3)
    if draw < 10 * CHANCE:
        print("x" * 1000, file=sys.stderr)
    return sum(a == b for a, b in zip(response, target, strict=False)) / max(len(response), len(target), 1)


def named(pid: int) -> str:
    """What a process calls itself; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def family(root: int) -> list[int]:
    """The processes of the run whose controller is `root`, which is left out."""
    pids = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{MARK}={os.getpid()}".encode() in environ.read_bytes().split(b"\0"):
                pids.append(int(environ.parent.name))
    return [pid for pid in pids if pid != root]


def sample(root: int) -> Sample:
    """Memory in MB, open descriptors and shared memory in MB of a run's processes."""
    resident = descriptors = 0
    for pid in (root, *family(root)):
        with suppress(OSError):
            _, pages, mapped, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
            resident += pages - mapped  # files and what processes share counts once, below
            descriptors += len(os.listdir(f"/proc/{pid}/fd"))
    shared = sum(file.stat().st_size for file in Path("/dev/shm").glob("forge-weights-*/*/*") if file.is_file())
    return {"memory": resident * os.sysconf("SC_PAGE_SIZE") / 1e6, "descriptors": descriptors, "shared": shared / 1e6}


class Run:
    """The run in a process of its own, resumed whenever it ends early."""

    def __init__(self, settings: dict[str, Any], output: Path) -> None:
        self._metrics, self._rows = ROOT / "runs" / settings["run.name"] / "metrics.jsonl", 0
        words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        self._command = [sys.executable, "-m", "forge", "train", str(ROOT / "apps/grpo/tiny.yaml"), *words]
        self._output = output.open("w")
        self.process = self._start("--run.overwrite", "true")

    def _start(self, *words: str) -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), MARK: str(os.getpid())}
        return subprocess.Popen(
            [*self._command, *words],
            cwd=ROOT,
            env=environment,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    def resume(self) -> int:
        """Wait for the end of the process, and resume the run; its exit code."""
        code = self.process.wait()
        self._rows = self._metrics.read_bytes().count(b"\n")
        self.process = self._start("--resume", "auto")
        return code

    def has_trained(self) -> bool:
        """Whether the process has done a step."""
        return self._metrics.exists() and self._metrics.read_bytes().count(b"\n") > self._rows + 1

    def all(self, number: signal.Signals) -> None:
        """Send a signal to every process."""
        for pid in (self.process.pid, *family(self.process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def strike(run: Run, kind: str, rng: random.Random) -> str | None:
    """Do a fault; what it was, None if there was nothing to hit."""
    processes = {pid: named(pid) for pid in family(run.process.pid)}
    if kind == "busy":
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
        time.sleep(10)
        for process in busy:
            process.kill()
            process.wait()
        return kind
    if kind.endswith("all"):
        number = signal.Signals[kind.split()[0]]
        run.all(number)
        code = run.resume()
        expected = {signal.SIGTERM: SAVED, signal.SIGKILL: -signal.SIGKILL}[number]
        if code != expected:
            raise SystemExit(f"{kind}: the run ended with {code}, not {expected}")
        return kind
    server = kind == "fork server"
    candidates = [
        pid for pid, name in processes.items() if (name == "forge-fork") == server and name and name not in HELPERS
    ]
    if not candidates:
        return None
    pid = rng.choice(sorted(candidates))
    number = signal.SIGKILL if server else signal.Signals[kind]
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    return kind if server else f"{kind} {processes[pid].rstrip('0123456789')}"


def check(folder: Path) -> tuple[int, int, list[str]]:
    """Steps, groups that were dropped, and the faults of a run's records.

    A group that a fault delayed until it was too old is dropped, counted, and replaced by one of a new number.
    """
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = int(rows[-1]["step"])
    rollouts = Result(folder).rollouts
    indices = [rollout["index"] for rollout in rollouts]
    buffer = checkpoint.read_extra(checkpoint.list_checkpoints(folder / "checkpoints")[-1])["buffer"]
    dropped = buffer["dropped"]["too_old"] + buffer["dropped"]["unscored"]
    checks = {
        "steps are missing or doubled": [row["step"] for row in rows] == list(range(steps + 1)),
        "a group trained twice": len(indices) == len(set(indices)) == steps * BATCH,
        "groups are not whole": all(len(rollout["rewards"]) == SAMPLES for rollout in rollouts),
        "a group is older than allowed": all(row.get("policy_age/max", 0) <= 1 for row in rows),
    }
    return steps, dropped, [name for name, right in checks.items() if not right]


def main() -> None:
    """Run, strike, and check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1 / 6)
    parser.add_argument("--every", type=float, nargs=2, default=(5.0, 15.0), help="seconds from fault to fault")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    name, rng, counts = f"soak-{args.seed}", random.Random(args.seed), collections.Counter[str]()
    settings = {
        "run.name": name,
        "training.steps": 10**6,
        "training.schedule": "constant",
        "training.batch_size": BATCH,
        "async.max_policy_age": 1,
        "checkpoint.every": 10,
        "checkpoint.keep": 2,
        "metrics.rollouts": BATCH,
        "reward.functions": '["benchmarks.soak:misbehaving"]',
        "reward.accuracy": "null",
        "services.reward": "{num_replicas: 1}",
        "eval.every": 0,
        "seed": args.seed,
        # These deaths are no request's doing: several of them around one request are bad luck.
        **{f"services.{service}.quarantine_after": 10 for service in ("generator", "trainer", "reward")},
    }
    (ROOT / "runs").mkdir(exist_ok=True)
    run = Run(settings, ROOT / "runs" / f"{name}.log")
    end, due, samples = time.monotonic() + 3600 * args.hours, time.monotonic() + 30, list[Sample]()
    while time.monotonic() < end or not run.has_trained():
        time.sleep(1)
        if (code := run.process.poll()) is not None:
            raise SystemExit(f"the run ended by itself with {code}: see runs/{name}.log")
        samples.append(sample(run.process.pid))
        if any(args.every) and time.monotonic() > due and run.has_trained():
            (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
            counts[strike(run, kind, rng) or "nothing to hit"] += 1
            due = time.monotonic() + rng.uniform(*args.every)
    run.process.terminate()
    if (code := run.process.wait()) != SAVED:
        raise SystemExit(f"the run ended with {code}, not {SAVED}: see runs/{name}.log")
    steps, dropped, wrong = check(ROOT / "runs" / name)
    print(f"{sum(counts.values())} faults in {args.hours:.2f} h: {dict(sorted(counts.items()))}")
    print(f"{steps} steps; {dropped} groups dropped, counted and replaced")
    third = len(samples) // 3
    for key in samples[0]:
        first, last = (statistics.median(row[key] for row in part) for part in (samples[:third], samples[-third:]))
        print(f"{key}: {first:.0f} in the first third, {last:.0f} in the last (medians)")
        if last > 1.2 * first + 20:
            wrong.append(f"{key} grew")
    raise SystemExit("; ".join(wrong) or 0)


if __name__ == "__main__":
    main()
