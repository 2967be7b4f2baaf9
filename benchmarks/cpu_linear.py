"""A training step with and without oneDNN products, on one thread, alternating.

    OMP_NUM_THREADS=1 python benchmarks/cpu_linear.py

Prints tokens per CPU-second, medians, for the quickstart's model and one of 25M parameters.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import numpy as np
import torch
from processor import described

from forge.data.packing import pack
from forge.losses import GRPOLoss
from forge.models import build_small_model
from forge.training import linear as cpu_linear
from forge.training.distributed import join
from forge.training.settings import OptimizerSettings
from forge.training.trainer import PolicyTrainer
from forge.types import Episode

SIZES = {"0.8M": (128, 4, 512), "25M": (512, 8, 32)}


def main() -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    print(f"{described()}\n")
    print("| model | torch tok/CPU-s | oneDNN tok/CPU-s | ratio |\n|---|---|---|---|")
    for name, (hidden, layers, sequences) in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            build_small_model(
                folder, seed=0, alphabet=None, hidden_size=hidden, layers=layers, heads=4, kv_heads=2, max_positions=128
            )
            trainer = PolicyTrainer(folder, join(), OptimizerSettings(learning_rate=1e-5), seq_len=2048)
        episodes = [
            Episode(
                prompt_ids=rng.integers(3, 90, 9).tolist(),
                response_ids=rng.integers(3, 90, int(length)).tolist(),
                advantage=float(rng.normal()),
            )
            for length in rng.integers(4, 10, sequences) * (1 if sequences > 100 else 6)
        ]
        batch = pack(episodes)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(10):
            for fast in (False, True):
                cpu_linear.AVAILABLE = fast
                start = time.process_time()
                trainer.train_step(batch, GRPOLoss())
                if turn > 1:
                    seconds[fast].append(time.process_time() - start)
        slow, quick = (len(batch.tokens) / statistics.median(seconds[fast]) for fast in (False, True))
        print(f"| {name} | {slow:.0f} | {quick:.0f} | {quick / slow:.2f} |")


if __name__ == "__main__":
    main()
