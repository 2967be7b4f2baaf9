"""A part of `gpu.py`: the peak that `forge plan` says of a trainer, alongside what the device's allocator holds."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from gpu_setup import Row, Setup, ranks
from planned_memory import measured_peak
from torch.distributed.tensor import DTensor

from forge.training.settings import LoraSettings, OptimizerSettings, PassSettings
from forge.training.trainer import PolicyTrainer
from forge_inspect.plan.components import full_batch, weighted_scores
from forge_inspect.plan.passes import run_passes, trainer_memory

MOST = 0.1  # the error that a plan may have


class Case(NamedTuple):
    """A trainer of one rank: tokens of its packs, packs of an update, and settings."""

    name: str
    tokens: int
    packs: int = 1
    rank: int | None = None
    passes: dict[str, Any] = {}  # noqa: RUF012
    optimizer: dict[str, Any] = {}  # noqa: RUF012


RECOMPUTED = {"gradient_checkpointing": True}
CASES = (
    Case("all weights", 8192),
    Case("two packs", 8192, packs=2),
    Case("recomputed", 8192, passes=RECOMPUTED),
    Case("recomputed, long", 32_768, passes=RECOMPUTED),
    Case("adapters", 8192, rank=16),
    Case("adapters, recomputed, long", 32_768, rank=16, passes=RECOMPUTED),
    Case("moments in bfloat16", 8192, passes=RECOMPUTED, optimizer={"optimizer_dtype": "bfloat16"}),
)


def planned_peaks(setup: Setup) -> Iterator[Row]:
    """Each case: planned and measured bytes at the peak of an update, with weights and states."""
    # All plans first: they want no process group, and trainers of bfloat16 join one.
    cases = CASES[:2] if setup.quick else CASES
    plans = [plan(case, setup) for case in cases]
    for case, planned in zip(cases, plans, strict=True):
        measured = measure(case, setup)
        error = planned / measured - 1
        figure = f"{planned / 2**30:.2f} planned, {measured / 2**30:.2f} GiB, {error:+.1%}"
        limit = f"{MOST:.0%}" if setup.on_gpu else ""
        yield Row(f"plan: {case.name}, {tokens(case, setup):,} tokens", figure, limit, not limit or abs(error) <= MOST)


def tokens(case: Case, setup: Setup) -> int:
    """Tokens of a pack."""
    return 512 if setup.quick else case.tokens


def plan(case: Case, setup: Setup) -> int:
    """The planned peak, in bytes."""
    settings = PassSettings(seq_len=tokens(case, setup), dtype=setup.dtype, **case.passes)
    lora = None if case.rank is None else LoraSettings(rank=case.rank)
    batch = full_batch(settings.seq_len, settings.seq_len // 4, 1)
    passes = run_passes(setup.model, batch, weighted_scores, settings, lora=lora, device_type=setup.device.type)
    shards = 1 if setup.dtype == "bfloat16" else None
    optimizer = OptimizerSettings(**case.optimizer)
    return trainer_memory(passes, settings, optimizer, shards=shards, micro_batches=case.packs).total


def measure(case: Case, setup: Setup) -> int:
    """The measured one: in the third update, when libraries have prepared what they keep."""
    gc.collect()
    before = 0
    if setup.on_gpu:
        torch.accelerator.empty_cache()
        before = torch.accelerator.memory_allocated()
    length = tokens(case, setup)
    lora = None if case.rank is None else LoraSettings(rank=case.rank)
    policy = PolicyTrainer(
        setup.model,
        ranks(setup.dtype),
        OptimizerSettings(**case.optimizer),
        seq_len=length,
        dtype=setup.dtype,
        lora=lora,
        **case.passes,
    )
    batch = full_batch(length * case.packs, length // 4, 1)
    for _ in range(2):
        policy.train_step(batch, weighted_scores)
    if setup.on_gpu:
        torch.accelerator.reset_peak_memory_stats()
        policy.train_step(batch, weighted_scores)
        return torch.accelerator.max_memory_allocated() - before
    states = [value for state in policy.optimizer.state.values() for value in state.values()]
    tensors = [*policy.policy.parameters(), *states]
    held = sum(bytes_of(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor))
    return held + measured_peak(lambda: policy.train_step(batch, weighted_scores))


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of this rank's part of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
