"""What a layout of the trainer's ranks costs, and how far it is from one process: gloo, CPU, float32.

Usage: python benchmarks/layouts.py

Every layout trains the same small Llama on the same packed batches. Memory is how far a rank's resident set grows from
before the model is read to its peak; CPU seconds are those of all ranks, of which there may be more than cores.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_setup import Setup, build, on_ranks
from transformers import LlamaConfig, LlamaForCausalLM

from forge.data.packing import pack
from forge.losses import GRPOLoss
from forge.training.distributed import Ranks
from forge.training.settings import OptimizerSettings, Parallelism
from forge.training.trainer import PolicyTrainer
from forge.types import Batch, Episode

VOCABULARY, STEPS, WARM = 2048, 6, 2
DEGREES = tuple(
    f"{kind}_degree"
    for kind in ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel")
)
# By copies, shards, context, tensor.
LAYOUTS = [
    (1, 1, 1, 1),
    (1, 2, 1, 1),
    (2, 1, 1, 1),
    (1, 1, 2, 1),
    (1, 1, 1, 2),
    (1, 4, 1, 1),
    (2, 2, 1, 1),
    (1, 2, 2, 1),
    (1, 2, 1, 2),
    (2, 1, 1, 2),
    (1, 1, 2, 2),
    (1, 1, 4, 1),
    (1, 1, 1, 4),
]


def batch(seed: int) -> Batch:
    """About 4,000 tokens in 24 episodes."""
    random = np.random.default_rng(seed)
    episodes = []
    for _ in range(24):
        context, response = random.integers(16, 64), random.integers(64, 192)
        episodes.append(
            Episode(
                prompt_ids=random.integers(3, VOCABULARY, context).tolist(),
                response_ids=random.integers(3, VOCABULARY, response).tolist(),
                logprobs=random.uniform(-9, -6, response).tolist(),
                versions=[0] * int(response),
                advantage=float(random.normal()),
            )
        )
    return pack(episodes)


def measure(ranks: Ranks, setup: Setup) -> dict[str, Any]:
    """Losses, MB that the resident set grew by at most, and medians of a step's wall and CPU seconds."""
    torch.set_num_threads(1)
    first = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
    trainer = PolicyTrainer(setup.model, ranks, OptimizerSettings(learning_rate=1e-4), seq_len=4096)
    losses, walls, cpus = [], [], []
    for seed in range(STEPS):
        wall, cpu = time.monotonic(), time.process_time()
        losses.append(trainer.train_step(batch(seed), GRPOLoss())["loss"])
        walls.append(time.monotonic() - wall)
        cpus.append(time.process_time() - cpu)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6 - first
    seconds = (statistics.median(times[WARM:]) for times in (walls, cpus))
    return dict(zip(("losses", "memory", "wall", "cpu"), (losses, most, *seconds), strict=True))


def name(degrees: tuple[int, int, int, int]) -> str:
    words = zip(("replicate", "shard", "context", "tensor"), degrees, strict=True)
    return " x ".join(f"{word} {degree}" for word, degree in words if degree > 1) or "one process"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(
        "| layout | ranks | MB per rank | s a step | CPU s a step | loss, from one process |\n|---|---|---|---|---|---|"
    )
    expected: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup("tiny", Path(folder))
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=320,
            intermediate_size=864,
            num_hidden_layers=7,
            num_attention_heads=8,
            num_key_value_heads=4,
            tie_word_embeddings=True,
        )
        build(setup.model, config, LlamaForCausalLM)
        for degrees in LAYOUTS:
            found = on_ranks(measure, setup, Parallelism(**dict(zip(DEGREES, degrees, strict=True))), prod(degrees))
            expected = expected or found[0]["losses"]
            apart = max(abs(a - b) for a, b in zip(found[0]["losses"], expected, strict=True))
            memory, cpu = max(one["memory"] for one in found), sum(one["cpu"] for one in found)
            cells = name(degrees), len(found), f"{memory:.0f}", f"{found[0]['wall']:.2f}", f"{cpu:.2f}"
            print(f"| {' | '.join(map(str, cells))} | {f'{apart:.0e}' if len(found) > 1 else ''} |", flush=True)


if __name__ == "__main__":
    main()
