"""What `training.exact` costs: a GRPO step's generation and training with and without it, in turn, in one process.

    python benchmarks/exact.py                  # 3.2M and 25M
    python benchmarks/exact.py --models 135M --rows 16 --repeats 3

Each repeat samples `--rows` completions, four of a prompt, and trains with a learning rate of 0. Seconds are CPU
time, medians; then the largest mean difference of log-probabilities of engine and trainer in a step.
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


def run_step(engine: EmbeddedEngine, trainer: PolicyTrainer, args: argparse.Namespace, seed: int) -> list[float]:
    """Return the seconds of generation and training, and the difference."""
    started = time.process_time()
    rng = np.random.default_rng(seed)
    prompts = rng.integers(3, 250, (args.rows // 4, args.prompt)).tolist()
    futures = [engine.submit(prompt, Sampling(4, args.tokens, seed=seed)) for prompt in prompts]
    completions = [completion for future in futures for completion in future.result()]
    sampled = time.process_time()
    batch = pack([Episode(completion, advantage=rng.normal()) for completion in completions])
    batch.versions[batch.mask] = trainer.step  # they are of these weights, which do not change
    difference = trainer.train_step(batch, GRPO())["engine_difference"]
    return [sampled - started, time.process_time() - sampled, difference]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["3.2M", "25M"])
    for name, default in {"rows": 64, "prompt": 32, "tokens": 64, "repeats": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    ranks, optimizer = Ranks(0, 1, torch.device("cpu"), None), OptimizerSettings(learning_rate=0.0)
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            build(name, folder)
            sides = [
                (
                    EmbeddedEngine(folder, device="cpu", exact=exact),
                    PolicyTrainer(Path(folder), ranks, optimizer, exact=exact),
                )
                for exact in (False, True)
            ]
            steps = np.array([[run_step(*side, args, repeat) for side in sides] for repeat in range(args.repeats + 1)])[
                1:
            ]
        generation, training = (np.median(steps[:, :, part], 0) for part in range(2))
        ratios = steps[:, 1, :2].sum(1) / steps[:, 0, :2].sum(1)
        print(
            f"{name}: generation {generation[0]:.2f} s, exact {generation[1]:.2f}; training {training[0]:.2f} s, "
            f"exact {training[1]:.2f}; step {median(ratios):.2f} times ({ratios.min():.2f} to {ratios.max():.2f}); "
            f"difference {steps[:, 0, 2].max():.2g}, exact {steps[:, 1, 2].max():.2g}",
            flush=True,
        )


if __name__ == "__main__":
    as_a_component()
    main()
