"""Muon's step with its matrices divided over ranks against every rank computing all of them: seconds, peak, bytes sent.

    python -m benchmarks.muon
    python -m benchmarks.muon --ranks 2 --width 1024

Gloo ranks of one thread each, FSDP2 (and HSDP on four), float32 weights. Both sides take turns on the same gradients.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.planned_memory import measured_peak
from forge.training import muon
from forge.training.distributed import join, leave
from forge.training.optimizers import build_optimizer
from forge.training.settings import OptimizerSettings, Parallelism

LAYERS = 4
ROUNDS = 3


class Stack(nn.Module):
    """The matrices of decoder layers, with the proportions of Qwen3-8B, and no other weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        shapes = [(width, width)] * 2 + [(width // 4, width)] * 2 + [(3 * width, width)] * 2 + [(width, 3 * width)]
        layer = [nn.ParameterList(nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes) for _ in range(LAYERS)]
        self.layers = nn.ModuleList(layer)


def work(rank: int, ranks: int, copies: int, width: int, store: str, answers: Any) -> None:
    """Step with and without the division in turn; the first rank answers with the seconds and the bytes of both."""
    torch.set_num_threads(1)
    layout = Parallelism(data_parallel_replicate_degree=copies)
    joined = join(rank, ranks, dist.FileStore(store, ranks), layout)
    torch.manual_seed(0)
    # `build_optimizer` takes the matrices of what is called `model.layers`.
    model = nn.Sequential()
    model.add_module("model", Stack(width))
    fully_shard(model, mesh=joined.mesh)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.01
    optimizer = build_optimizer(model, OptimizerSettings(optimizer="muon", learning_rate=1e-3))
    optimizer.step()
    sides = {"divided": muon._is_divided, "whole": lambda _: False}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    peaks = {}
    for number in range(ROUNDS + 1):
        for side, rule in sides.items():
            with mock.patch.object(muon, "_is_divided", rule):
                dist.barrier()
                begin = time.perf_counter()
                # The profiler takes time: the peak is of a step that is not timed.
                if number == ROUNDS:
                    peaks[side] = measured_peak(optimizer.step)
                    continue
                optimizer.step()
                dist.barrier()
                seconds[side].append(time.perf_counter() - begin)
    if rank == 0:
        answers.put((seconds, peaks))
    leave()


def measure(ranks: int, copies: int, width: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """What the first of so many ranks measured."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, copies, width, str(Path(folder) / "store"), answers)
        processes = [context.Process(target=work, args=(rank, *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        answer: tuple[dict[str, list[float]], dict[str, int]] = answers.get(timeout=240)
        for process in processes:
            process.join(60)
    return answer


def main() -> None:
    """Print a row of each layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=None)
    parser.add_argument("--width", type=int, default=512)
    args = parser.parse_args()
    largest = 3 * args.width * args.width
    print("| ranks, copies | all on every rank, s | divided, s | ratio | peak, in elements of the largest matrix |")
    print("|---|---|---|---|---|")
    for ranks, copies in [(2, 1), (4, 1), (4, 2)] if args.ranks is None else [(args.ranks, 1)]:
        seconds, peaks = measure(ranks, copies, args.width)
        whole, divided = (statistics.median(seconds[side]) for side in ("whole", "divided"))
        ratio = statistics.median(a / b for a, b in zip(seconds["whole"], seconds["divided"], strict=True))
        bytes_per_element = [peaks[side] / largest for side in ("whole", "divided")]
        print(
            f"| {ranks}, {copies} | {whole:.3f} | {divided:.3f} | {ratio:.2f} | "
            f"{bytes_per_element[0]:.1f} bytes, divided {bytes_per_element[1]:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
