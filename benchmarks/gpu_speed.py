"""Parts of `gpu.py` that measure: the device, engines, the trainer alongside published figures, weight sync, a run."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu_setup import PEAK, Row, Setup, engine_cases, generated, prompts, synchronize, trainer

from forge.data.packing import pack
from forge.engines import load_engine
from forge.losses import GRPOLoss
from forge.runtime.store import VersionStore
from forge.training.settings import LoraSettings
from forge.types import Batch, Episode

WARMUP = Path("runs/quickstart-warmup/model")


class Published(NamedTuple):
    """A row of prime-rl's table of baselines for Qwen3-0.6B on one H100: its trainer only, two micro-batches of
    synthetic data, recomputed activations, FlashAttention 3 (benchmarks/baselines/, January 2026)."""

    tokens: int
    rank: int | None
    rate: float
    peak: float


PUBLISHED = (
    Published(16_384, None, 11_896, 12.53),
    Published(65_536, None, 10_147, 19.56),
    Published(65_536, 16, 9_967, 11.45),
)


def repeated(act: Callable[[], Any], setup: Setup, times: int = 3) -> float:
    """The median of its seconds, after one that is not measured."""
    act()
    taken = []
    for _ in range(times):
        synchronize(setup)
        start = time.perf_counter()
        act()
        synchronize(setup)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def device(setup: Setup) -> Iterator[Row]:
    """The ceilings of this device: a product of bfloat16 matrices, and a copy."""
    size = 8192 if setup.on_gpu else 512
    a, b = (torch.randn(size, size, device=setup.device, dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * size**3 / repeated(lambda: [a @ b for _ in range(10)], setup) * 10 / 1e12
    yield Row("product of bfloat16 matrices", f"{rate:,.1f} TFLOP/s")
    source = torch.randn(2**28 if setup.on_gpu else 2**20, device=setup.device)
    target = torch.empty_like(source)
    rate = 2 * source.nbytes / repeated(lambda: target.copy_(source), setup) / 1e12
    yield Row("copy, bytes read and written", f"{rate:.2f} TB/s")
    host = torch.empty(2**26 if setup.on_gpu else 2**20)
    back = host.nbytes / repeated(lambda: host.copy_(source[: len(host)]), setup) / 1e9
    yield Row("copy to pageable host memory", f"{back:.1f} GB/s")


def generation(setup: Setup) -> Iterator[Row]:
    """Tokens a second of each engine, and milliseconds of a decode step."""
    tokens = 16 if setup.quick else 256
    for name, kind, settings in engine_cases(setup):
        for batch in (4, 8) if setup.quick else (8, 256):
            engine = load_engine(kind, setup.model, slots=batch, max_seq_len=1024, dtype=setup.dtype, **settings)
            contexts = prompts(batch, 32, setup.shape["vocab_size"])
            try:
                seconds = repeated(lambda: generated(engine, contexts, tokens), setup, times=2)  # noqa: B023
                rate = batch * tokens / seconds
                yield Row(f"{name}, batch {batch}: tokens/s, step", f"{rate:,.0f}, {1e3 * seconds / tokens:.1f} ms")
                if setup.device.type == "cuda" and batch > 8:
                    what = f"{name}, batch {batch}: kernels of a step, their time over the step's"
                    few = tokens // 16
                    kernels, busy = kernels_of(lambda: generated(engine, contexts, few), setup)  # noqa: B023
                    yield Row(what, f"{kernels / few:,.0f}, {16 * busy / seconds:.0%}")
            finally:
                engine.close()


def long_samples(setup: Setup) -> Iterator[Row]:
    """The rollouts of apps/grpo/qwen3_1_7b.yaml at their longest: 256 slots, each with 2,560 tokens."""
    slots, prompt, tokens = (8, 200, 16) if setup.quick else (256, 2432, 128)
    engine = load_engine("embedded", setup.model, slots=slots, max_seq_len=4096, dtype=setup.dtype)
    contexts = prompts(slots, prompt, setup.shape["vocab_size"])
    start = time.perf_counter()
    try:
        drawn = generated(engine, contexts, tokens)
    finally:
        engine.close()
    seconds = time.perf_counter() - start
    whole = sum(len(completion.token_ids) == tokens for completion in drawn)
    most = f", {torch.accelerator.max_memory_allocated() / 2**30:.1f} GiB" if setup.on_gpu else ""
    yield Row(f"{slots} samples of {prompt + tokens} tokens", f"{seconds:.1f} s{most}", "all", whole == slots)


def lengths(setup: Setup) -> Iterator[Row]:
    """What a cache of rows costs alongside one of pages: attention reads as many positions of a row as the longest has.

    A decode step of rows of 512 tokens, and of as many tokens of which one row has 4,096; pages would read the same.
    """
    slots, mean, longest = (8, 32, 128) if setup.quick else (64, 512, 4096)
    short, tokens, vocab = (8, 24, setup.shape["vocab_size"]) if setup.quick else (16, 144, setup.shape["vocab_size"])
    rest = (slots * mean - longest) // (slots - 1)
    contexts = {
        "equal": prompts(slots, mean, vocab),
        "one long": [*prompts(1, longest, vocab), *prompts(slots - 1, rest, vocab)],
    }
    for name, kind, settings in engine_cases(setup):
        steps = {}
        engine = load_engine(kind, setup.model, slots=slots, max_seq_len=longest + 512, dtype=setup.dtype, **settings)
        try:
            for case, rows in contexts.items():
                few = repeated(lambda: generated(engine, rows, short), setup, times=2)  # noqa: B023
                many = repeated(lambda: generated(engine, rows, tokens), setup, times=2)  # noqa: B023
                steps[case] = 1e3 * (many - few) / (tokens - short)
        finally:
            engine.close()
        figure = ", ".join(f"{case} {milliseconds:.1f} ms" for case, milliseconds in steps.items())
        yield Row(f"{name}, {slots} rows of {mean} tokens on average: a step", figure)


def rows_of(length: int, count: int, vocab: int) -> Batch:
    """Sequences of random tokens, of which all but 16 are trained."""
    return pack(
        [
            Episode(prompt_ids=ids[:16], response_ids=ids[16:], reward=1.0, advantage=float(i % 2) - 0.5)
            for i, ids in enumerate(prompts(count, length, vocab))
        ]
    )


def operations(setup: Setup, length: int) -> float:
    """Floating-point operations of a trained token, without those of a recomputation.

    Chowdhery et al. 2022 (PaLM), appendix B; a causal token attends to half of its sequence.
    """
    shape = setup.shape
    heads = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    layer = shape["hidden_size"] * (2 * heads + 2 * keys + 3 * shape["intermediate_size"])
    weights = shape["num_hidden_layers"] * layer + shape["vocab_size"] * shape["hidden_size"]
    return 6 * weights + 6 * shape["num_hidden_layers"] * heads * length


def training(compiled: bool, setup: Setup) -> Iterator[Row]:
    """A GRPO step of 16 sequences of 2,048 tokens: tokens a second, share of the peak, and of the time that the device
    computes."""
    who = "trainer, compiled" if compiled else "trainer"
    length, count = (128, 8) if setup.quick else (2048, 16)
    policy = trainer(setup.model, setup.dtype, 4 * length, compile=compiled)
    batch, loss = rows_of(length, count, setup.shape["vocab_size"]), GRPOLoss()
    start = time.perf_counter()
    policy.train_step(batch, loss)
    yield Row(f"{who}: first step", f"{time.perf_counter() - start:.1f} s")
    seconds = repeated(lambda: policy.train_step(batch, loss), setup)
    rate = len(batch.tokens) / seconds
    peak = next((peak for name, peak in PEAK.items() if name in device_name(setup)), None)
    share = f", {rate * operations(setup, length) / peak:.1%} of the peak" if peak else ""
    yield Row(f"{who}, {count} x {length}: tokens/s", f"{rate:,.0f}{share}")
    if setup.device.type != "cuda":
        return
    yield Row(f"{who}: most memory", f"{torch.accelerator.max_memory_allocated() / 2**30:.1f} GiB")
    kernels, busy = kernels_of(lambda: policy.train_step(batch, loss), setup)
    yield Row(f"{who}: kernels of a step, their time over the step's", f"{kernels:,}, {busy / seconds:.0%}")


def kernels_of(act: Callable[[], Any], setup: Setup) -> tuple[int, float]:
    """The number of kernels and their seconds; the longest of them are printed, all calls of one together."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        act()
        synchronize(setup)
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    totals: dict[str, float] = {}
    for event in kernels:
        totals[event.name] = totals.get(event.name, 0.0) + event.device_time / 1e3
    for name, spent in sorted(totals.items(), key=lambda item: -item[1])[:12]:
        print(f"    {spent:8.1f} ms  {name[:110]}", file=sys.stderr)
    return len(kernels), sum(totals.values()) / 1e3


def published(lora: bool, setup: Setup) -> Iterator[Row]:
    """A step of two micro-batches alongside prime-rl's figures on the same card, of all weights or of adapters."""
    rows = [row for row in PUBLISHED if (row.rank is not None) == lora]
    for row in rows[:1] if setup.quick else rows:
        yield from beside(row, setup)
        if setup.on_gpu:
            torch.accelerator.empty_cache()


def beside(row: Published, setup: Setup) -> Iterator[Row]:
    """Our figures for one of its rows."""
    length = 256 if setup.quick else row.tokens
    lora = None if row.rank is None else LoraSettings(rank=row.rank)
    policy = trainer(setup.model, setup.dtype, length, lora=lora, gradient_checkpointing=True)
    batch, loss = rows_of(length, 2, setup.shape["vocab_size"]), GRPOLoss()
    if setup.on_gpu:
        torch.accelerator.reset_peak_memory_stats()
    rate = len(batch.tokens) / repeated(lambda: policy.train_step(batch, loss), setup, times=1)
    what = f"{setup.size}, {length:,} x 2, {'all weights' if row.rank is None else f'LoRA {row.rank}'}"
    comparable = setup.on_gpu and setup.size == "0.6b"
    yield Row(f"{what}: tokens/s", f"{rate:,.0f}", f"prime-rl {row.rate:,.0f}", not comparable or rate >= row.rate)
    if setup.on_gpu:
        most = torch.accelerator.max_memory_allocated() / 2**30
        fits = not comparable or most <= 1.1 * row.peak
        yield Row(f"{what}: most memory", f"{most:.2f} GiB", f"1.1 x prime-rl's {row.peak:.2f}", fits)


def weight_sync(setup: Setup) -> Iterator[Row]:
    """Seconds from a trainer's weights to an engine that decodes with them, through the store."""
    policy, dtype = trainer(setup.model, setup.dtype), getattr(torch, setup.dtype)
    store, numbers = VersionStore.create(), itertools.count(1)
    try:
        for name in setup.engines:
            engine = load_engine(name, setup.model, slots=8, max_seq_len=256, dtype=setup.dtype)
            put, taken, size = [], [], 0
            try:
                for version in itertools.islice(numbers, 3):
                    start = time.perf_counter()
                    store.put("policy", policy.weights(), version, dtype=dtype)
                    middle = time.perf_counter()
                    with store.open("policy", version) as snapshot:
                        tensors = snapshot.tensors()
                        engine.update_weights(tensors, version, snapshot.digest).result(timeout=600)
                    put.append(middle - start)
                    taken.append(time.perf_counter() - middle)
            finally:
                engine.close()
            size = sum(tensor.numel() for tensor in policy.weights().values()) * dtype.itemsize
            seconds = [statistics.median(times) for times in (put, taken)]
            figures = " / ".join(f"{value:.2f}" for value in seconds)
            yield Row(f"{name}: {size / 1e9:.1f} GB of weights put / taken over", f"{figures} s")
    finally:
        store.close()


def colocated(setup: Setup) -> Iterator[Row]:
    """The quickstart, lock-step, with one device for trainer and generator."""
    if not WARMUP.exists():
        subprocess.run([sys.executable, "-m", "apps.sft.main", "--config", "apps/sft/tiny.yaml"], check=True)
    gpus = str(setup.on_gpu).lower()
    steps = 12 if setup.quick else 30
    options = {
        "colocated": "true",
        "async.max_policy_age": "0",
        "services.generator.num_replicas": "1",
        "services.generator.with_gpus": gpus,
        "services.trainer.with_gpus": gpus,
        "training.steps": steps,
        "eval.every": steps // 2,
        "training.dtype": setup.dtype,
        "generator.dtype": setup.dtype,
        "checkpoint.every": "0",
        "run.name": "gpu-colocated",
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "apps.grpo.main", "--config", "apps/grpo/tiny.yaml", *words], check=True)
    seconds = time.perf_counter() - start
    rows = [json.loads(line) for line in Path("runs/gpu-colocated/metrics.jsonl").read_text().splitlines()]
    accuracies = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    figure = f"{accuracies[0]:.3f} to {accuracies[-1]:.3f} in {steps} steps, {seconds:.0f} s"
    learned = setup.quick or accuracies[-1] >= 0.7
    yield Row("colocated quickstart: held-out accuracy", figure, "" if setup.quick else "at least .7", learned)
    times = [row["time/step"] for row in rows if "time/step" in row]
    if times:
        yield Row("colocated quickstart: a step", f"{np.median(times):.2f} s")


def device_name(setup: Setup) -> str:
    """The device's name, as its maker calls it."""
    return torch.get_device_module(setup.device).get_device_name() if setup.on_gpu else "CPU"
