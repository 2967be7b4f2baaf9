"""What a layout of the trainer's ranks costs, and how far it is from one process: gloo, CPU, float32.

Usage: python benchmarks/layouts.py

Every layout trains the same small Llama on the same packed batches. Memory is how far a rank's resident set grows from
before the model is read to its peak; CPU seconds are those of all ranks, of which there may be more than cores.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import LlamaConfig, LlamaForCausalLM

from forge.data.packing import pack
from forge.losses import GRPOLoss
from forge.training.distributed import join_ranks, leave_ranks
from forge.training.settings import OptimizerSettings, Parallelism
from forge.training.trainer import PolicyTrainer
from forge.types import Batch, Episode

VOCABULARY, STEPS, WARM = 2048, 6, 2
# Copies, shards, context, tensor.
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


def write_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=320,
        intermediate_size=864,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


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


class Peak:
    """The largest resident set of this process, in MB, above what it was when this was made."""

    def __init__(self) -> None:
        self._first = self._most = resident()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while True:
            self._most = max(self._most, resident())
            time.sleep(0.005)

    def __call__(self) -> float:
        return self._most - self._first


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def measure(rank: int, degrees: tuple[int, int, int, int], queue: Any, results: Any, model: Path) -> None:
    torch.set_num_threads(1)
    copies, shards, context, tensor = degrees
    size = int(np.prod(degrees))
    address = None
    if size > 1:
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            for _ in range(size):
                queue.put(f"127.0.0.1:{store.port}")
        address = queue.get()
    layout = Parallelism(
        data_parallel_replicate_degree=copies,
        data_parallel_shard_degree=shards,
        tensor_parallel_degree=tensor,
        context_parallel_degree=context,
    )
    ranks = join_ranks(rank, size, address, layout)
    peak = Peak()
    trainer = PolicyTrainer(model, ranks, OptimizerSettings(learning_rate=1e-4), seq_len=4096)
    losses, walls, cpus = [], [], []
    for seed in range(STEPS):
        wall, cpu = time.monotonic(), time.process_time()
        losses.append(trainer.train_step(batch(seed), GRPOLoss())["loss"])
        walls.append(time.monotonic() - wall)
        cpus.append(time.process_time() - cpu)
    results.put((rank, losses, peak(), statistics.median(walls[WARM:]), statistics.median(cpus[WARM:])))
    if size > 1:
        dist.barrier()
    leave_ranks()


def name(degrees: tuple[int, int, int, int]) -> str:
    words = zip(("replicate", "shard", "context", "tensor"), degrees, strict=True)
    return " x ".join(f"{word} {degree}" for word, degree in words if degree > 1) or "one process"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    context = mp.get_context("spawn")
    print(
        "| layout | ranks | MB per rank | s a step | CPU s a step | loss, from one process |\n|---|---|---|---|---|---|"
    )
    expected: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for degrees in LAYOUTS:
            queue, results = context.SimpleQueue(), context.Queue()
            size = int(np.prod(degrees))
            common = (degrees, queue, results, Path(folder))
            started = [context.Process(target=measure, args=(rank, *common)) for rank in range(size)]
            for process in started:
                process.start()
            found = [results.get(timeout=900) for _ in started]
            for process in started:
                process.join()
            _, losses, _, wall, _ = min(found)
            expected = expected or losses
            apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            memory, cpu = max(row[2] for row in found), sum(row[4] for row in found)
            distance = f"{apart:.0e}" if size > 1 else ""
            print(f"| {name(degrees)} | {size} | {memory:.0f} | {wall:.2f} | {cpu:.2f} | {distance} |", flush=True)


if __name__ == "__main__":
    main()
