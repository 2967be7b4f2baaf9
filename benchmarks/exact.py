"""What `training.exact` costs: a GRPO step's generation and training with and without it, in turn, in one process.

    python benchmarks/exact.py                  # 3.2M and 25M
    python benchmarks/exact.py --models 135M --rows 16

Each repeat samples `--rows` completions of prompts that four of them share, and trains on them. Seconds are this
process's CPU time, medians; the last column is the largest difference of a log-probability of engine and trainer.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
from engine import MODELS, build
from sides import as_a_component

from forge.algorithms import GRPO
from forge.data.packing import pack
from forge.engines import EmbeddedEngine
from forge.training.distributed import Ranks
from forge.training.settings import OptimizerSettings
from forge.training.trainer import PolicyTrainer
from forge.types import Episode, Sampling

GROUP = 4


class Side:
    """An engine and a trainer of one model, and the CPU-seconds of their repeats."""

    def __init__(self, folder: Path, exact: bool) -> None:
        ranks = Ranks(0, 1, torch.device("cpu"), None)
        self.engine = EmbeddedEngine(folder, device="cpu", exact=exact)
        self.trainer = PolicyTrainer(folder, ranks, OptimizerSettings(learning_rate=0.0), exact=exact)
        self.generation, self.training, self.differences = [], [], []  # one a repeat

    def run_step(self, args: argparse.Namespace, seed: int) -> None:
        """Sample completions and train on them."""
        started = time.process_time()
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(3, 250, args.prompt).tolist() for _ in range(args.rows // GROUP)]
        sampling = Sampling(GROUP, args.tokens, seed=seed)
        futures = [self.engine.submit(prompt, sampling) for prompt in prompts]
        completions = [completion for future in futures for completion in future.result()]
        sampled = time.process_time()
        self.generation.append(sampled - started)

        batch = pack([Episode(c, advantage=rng.normal()) for c in completions])
        batch.versions[batch.mask] = self.trainer.step  # the learning rate is 0: they are of these weights
        metrics = self.trainer.train_step(batch, GRPO())
        self.training.append(time.process_time() - sampled)
        self.differences.append(metrics["engine_difference"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["3.2M", "25M"])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()

    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            build(name, folder)
            sides = {exact: Side(Path(folder), exact) for exact in (False, True)}
            for repeat in range(args.repeats + 1):
                for side in sides.values():
                    side.run_step(args, repeat)
            plain, exact = sides.values()
        for part in ("generation", "training"):
            seconds = [median(getattr(side, part)[1:]) for side in sides.values()]
            print(f"{name} {part}: {seconds[0]:.2f} s, exact {seconds[1]:.2f} s, ratio {seconds[1] / seconds[0]:.2f}")
        ratios = [
            (e + f) / (a + b)
            for a, b, e, f in zip(plain.generation, plain.training, exact.generation, exact.training, strict=True)
        ][1:]
        print(f"{name} step: ratio {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)
        print(f"{name} difference: {max(plain.differences):.2g}, exact {max(exact.differences):.2g}", flush=True)


if __name__ == "__main__":
    as_a_component()
    main()
