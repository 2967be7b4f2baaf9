"""The quickstart's training with each pair of engine and trainer: held-out accuracy, start-up, memory, tokens per
CPU-second.

    python benchmarks/pairs.py --vllm PYTHON_WITH_VLLM --titan PYTHON_WITH_TITAN

Goes on from the quickstart's warm-up, runs/quickstart-warmup/model. Start-up is the time to the first logged line
(every process up, the first weights published, the first evaluation); memory the largest sum of what all processes have
for themselves (PSS); tokens are those that were generated for training and evaluation, CPU-seconds those of all
processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from sides import cpu_seconds, descendants

PAIRS = {
    "embedded + fsdp": {},
    "vllm + fsdp": {"generator.engine": "vllm"},
    "embedded + titan": {"trainer.backend": "titan"},
    "embedded + fsdp, colocated": {
        "colocated": "true",
        "async.max_policy_age": "0",
        "services.generator.num_replicas": "1",
    },
}


def memory(pids: list[int]) -> float:
    """Gigabytes that processes have for themselves, shared pages divided among those that share them."""
    found = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it has ended
        found += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return found / 1e6


def measure(name: str, python: str, args: argparse.Namespace) -> str:
    """One line of the table."""
    root = Path(args.root)
    options = {"run.name": name.replace(" ", ""), "run.root": str(root), "seed": str(args.seed), **PAIRS[name]}
    if args.steps:
        options |= {"training.steps": str(args.steps)}
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    metrics = root / options["run.name"] / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    before, start = cpu_seconds() - time.process_time(), time.monotonic()
    first = most = used = 0.0
    command = [python, "-m", "apps.grpo.main", "--config", "apps/grpo/tiny.yaml", *words]
    root.mkdir(parents=True, exist_ok=True)
    log = root / f"{options['run.name']}.log"
    with log.open("w") as said, subprocess.Popen(command, stdout=said, stderr=said) as process:
        while process.poll() is None:
            time.sleep(5)
            used = max(used, cpu_seconds() - time.process_time() - before)  # what has ended counts no more
            most = max(most, memory(descendants()))
            if not first and metrics.exists() and metrics.stat().st_size:
                first = time.monotonic() - start
    seconds = time.monotonic() - start
    if process.returncode:
        return f"| {name} | failed, see {log} |"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    accuracy = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    tokens = sum(row.get("generator/tokens", 0) for row in rows)
    figures = (f"{accuracy[0]:.3f} -> {accuracy[-1]:.3f}", f"{first:.0f}", f"{most:.2f}", f"{tokens / used:.0f}")
    return f"| {name} | {args.seed} | {' | '.join(figures)} | {seconds:.0f} | {used:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--vllm", help="python of an environment with vLLM")
    parser.add_argument("--titan", help="python of an environment with TorchTitan")
    parser.add_argument("--steps", type=int, help="the quickstart's own if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", default="runs/pairs")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print("| pair | seed | accuracy | start-up, s | memory, GB | tokens per CPU-s | s | CPU-s |\n|" + "---|" * 8)
    for name in args.pairs:
        python = args.vllm if "vllm" in name else args.titan if "titan" in name else sys.executable
        if python is None:
            print(f"| {name} | not run: its environment was not given |")
        else:
            print(measure(name, python, args), flush=True)


if __name__ == "__main__":
    main()
