"""The first steps of the quickstart's GRPO with each pair of engine and trainer: what they learn, and what it costs.

    python benchmarks/pairs.py                                       # in an environment with vLLM and TorchTitan
    python benchmarks/pairs.py --vllm PYTHON_WITH_VLLM --titan PYTHON_WITH_TITAN --both PYTHON_WITH_BOTH

All pairs start from one warm-up, which the quickstart's SFT leaves in the root, with the same task and seed. A run that
has not trained is an error: every gradient has a norm above 0, and every tensor of the exported model has changed.
Start-up is the time to the first logged line (every process up, the first weights published, the first evaluation);
memory the largest sum of what all processes have for themselves (PSS); CPU-seconds are those of all processes, with the
start, and tokens those that were generated for training and evaluation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from sides import cpu_seconds, descendants

COLOCATED = {"colocated": "true", "services.generator.num_replicas": "1"}
PAIRS = {
    "embedded + fsdp": {},
    "vllm + fsdp": {"generator.engine": "vllm"},
    "embedded + titan": {"trainer.backend": "titan"},
    "vllm + titan": {"generator.engine": "vllm", "trainer.backend": "titan"},
    "embedded + fsdp, colocated": COLOCATED,
    "vllm + fsdp, colocated": {"generator.engine": "vllm", **COLOCATED},
}
COLUMNS = (
    *("pair", "seed", "reward, first and last quarter", "`train/engine_difference`: mean, largest"),
    *("gradient norm", "largest change of a weight", "start-up, s", "memory, GB", "s", "CPU-s", "tokens per CPU-s"),
)


@dataclass(frozen=True)
class Costs:
    """What a run took: seconds, gigabytes and CPU-seconds."""

    start: float
    memory: float
    wall: float
    cpu: float


def memory(pids: list[int]) -> float:
    """Gigabytes that processes have for themselves, shared pages divided among those that share them."""
    kilobytes = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it has ended
        kilobytes += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kilobytes / 1e6


def execute(python: str, recipe: str, config: str, folder: Path, options: dict[str, str]) -> Costs:
    """Run `forge sft` or `forge train` in `folder`. SystemExit: it failed; names its log."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    options = {"run.name": folder.name, "run.root": str(folder.parent), **options}
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    log = folder.with_suffix(".log")
    command = [python, "-m", "forge", recipe, config, *words]
    before, start = cpu_seconds() - time.process_time(), time.monotonic()
    first = most = used = 0.0
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        while process.poll() is None:
            time.sleep(2)
            used = max(used, cpu_seconds() - time.process_time() - before)  # what has ended counts no more
            most = max(most, memory(descendants()))
            if not first and metrics.exists() and metrics.stat().st_size:
                first = time.monotonic() - start
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed, see {log}")
    return Costs(first, most, time.monotonic() - start, used)


def largest_change(before: Path, after: Path) -> float:
    """The largest absolute difference between two exported models. SystemExit: a tensor that has not changed."""
    old, new = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    changes = {name: (new[name].float() - tensor.float()).abs().max().item() for name, tensor in old.items()}
    if unchanged := [name for name, change in changes.items() if change == 0]:
        raise SystemExit(f"{after} has not trained: {', '.join(unchanged)} is as in {before}")
    return max(changes.values())


def measure(pair: str, seed: int, python: str, root: Path, steps: int) -> tuple[str, str]:
    """One line of the table, and the rewards of all steps."""
    folder, warmup = root / f"{pair.replace(' ', '').replace(',', '-')}-{seed}", root / "warmup/model"
    options = {"model": str(warmup), "seed": str(seed), **PAIRS[pair]}
    options |= dict.fromkeys(("training.steps", "eval.every", "checkpoint.every"), str(steps))
    costs = execute(python, "train", "apps/grpo/tiny.yaml", folder, options)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "train/grad_norm" in row]
    rewards = [row["reward"] for row in trained]
    differences = [row["train/engine_difference"] for row in trained]
    norms = [row["train/grad_norm"] for row in trained]
    if len(trained) != steps or min(norms) <= 0:
        raise SystemExit(f"{folder} has not trained: {len(trained)} steps, smallest gradient norm {min(norms)}")
    quarter = max(1, steps // 4)
    tokens = sum(row.get("generator/tokens", 0) for row in rows)
    cells = (
        pair,
        str(seed),
        f"{statistics.mean(rewards[:quarter]):.3f} -> {statistics.mean(rewards[-quarter:]):.3f}",
        f"{statistics.mean(differences):.1e}, {max(differences):.1e}",
        f"{min(norms):.2f} to {max(norms):.2f}",
        f"{largest_change(warmup, folder / 'model'):.1e}",
        f"{costs.start:.0f}",
        f"{costs.memory:.2f}",
        f"{costs.wall:.0f}",
        f"{costs.cpu:.0f}",
        f"{tokens / costs.cpu:.0f}",
    )
    return f"| {' | '.join(cells)} |", f"{pair}, seed {seed}: {' '.join(f'{reward:.3f}' for reward in rewards)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--vllm", default=sys.executable, help="python of an environment with vLLM")
    parser.add_argument("--titan", default=sys.executable, help="python of an environment with TorchTitan")
    parser.add_argument("--both", default=sys.executable, help="python of an environment with both")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--root", type=Path, default=Path("runs/pairs"))
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not (args.root / "warmup/model/model.safetensors").exists():
        execute(sys.executable, "sft", "apps/sft/tiny.yaml", args.root / "warmup", {})
    print(f"{torch.backends.cpu.get_cpu_capability()}, {args.steps} steps")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    curves = []
    for seed in args.seeds:
        for pair in args.pairs:
            engine, trainer = "vllm" in pair, "titan" in pair
            python = args.both if engine and trainer else args.vllm if engine else args.titan
            line, curve = measure(pair, seed, python if engine or trainer else sys.executable, args.root, args.steps)
            print(line, flush=True)
            curves.append(curve)
    print("\nreward of each step", *curves, sep="\n")


if __name__ == "__main__":
    main()
