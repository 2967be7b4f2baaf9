"""Parts of `gpu.py` that measure: the trainer and what its settings cost, engines, weight sync."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gpu_setup import (
    Row,
    Setup,
    build,
    engine_cases,
    forget_memory,
    generated,
    most_memory,
    prompts,
    synchronize,
    trainer,
)
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from forge.data.packing import pack
from forge.engines import load_engine
from forge.losses import GRPOLoss
from forge.runtime.store import VersionStore
from forge.types import Batch, Episode

# prime-rl's trainer of Qwen3-0.6B with adapters of rank 16 on one H100: two micro-batches of 65,536 tokens, recomputed
# activations, FlashAttention 3 (its benchmarks/baselines/, January 2026). Tokens a second, GiB.
PUBLISHED = 9_967, 11.45
# The sizes that families beyond `SIZES` add: Qwen3.5-0.8B's, and gpt-oss-20b's with 2 of its 24 layers; then tiny ones.
FAMILIES: dict[str, tuple[type, type, dict[str, Any], dict[str, Any]]] = {
    "Qwen3.5-0.8B": (
        Qwen3_5TextConfig,
        Qwen3_5ForCausalLM,
        {
            **{"vocab_size": 248_320, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24},
            **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "tie_word_embeddings": True},
            **{"linear_num_key_heads": 16, "linear_num_value_heads": 16},
        },
        {
            **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 32},
            **{"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 2},
            **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        },
    ),
    "gpt-oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {"num_hidden_layers": 2, "num_local_experts": 32},
        {
            **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32},
            **{"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2},
        },
    ),
}


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


def generation(setup: Setup) -> Iterator[Row]:
    """Tokens a second of each engine, and milliseconds of a decode step; of vLLM alongside the others."""
    tokens, rates = 16 if setup.quick else 256, dict[int, list[float]]()
    for name, kind, settings in engine_cases(setup):
        for batch in (8,) if setup.quick else (256, 8):
            forget_memory(setup)
            engine = load_engine(kind, setup.model, slots=batch, max_seq_len=1024, dtype=setup.dtype, **settings)
            contexts = prompts(batch, 32, setup.shape["vocab_size"])
            try:
                seconds = repeated(lambda: generated(engine, contexts, tokens), setup, times=2)  # noqa: B023
            finally:
                engine.close()
            rates.setdefault(batch, []).append(batch * tokens / seconds)
            ratio = f", {rates[batch][-1] / max(rates[batch][:-1]):.2f} of embedded" if kind == "vllm" else ""
            figure = f"{rates[batch][-1]:,.0f}{ratio}, {1e3 * seconds / tokens:.1f} ms"
            yield Row(f"{name}, batch {batch}: tokens/s, step", figure)
    if "vllm" not in setup.engines:
        yield Row("vllm", "not installed here")


def long_samples(setup: Setup) -> Iterator[Row]:
    """The rollouts of apps/grpo/qwen3_1_7b.yaml at their longest: 256 slots, each with 2,560 tokens."""
    slots, prompt, tokens = (8, 200, 16) if setup.quick else (256, 2432, 128)
    forget_memory(setup)
    engine = load_engine("embedded", setup.model, slots=slots, max_seq_len=4096, dtype=setup.dtype)
    contexts = prompts(slots, prompt, setup.shape["vocab_size"])
    start = time.perf_counter()
    try:
        drawn = generated(engine, contexts, tokens)
    finally:
        engine.close()
    seconds = time.perf_counter() - start
    whole = sum(len(completion.token_ids) == tokens for completion in drawn)
    figure = f"{seconds:.1f} s{most_memory(setup)}"
    yield Row(f"{slots} samples of {prompt + tokens} tokens", figure, "all", whole == slots)


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


def rows_of(length: int, count: int, vocab: int, seed: int = 0) -> Batch:
    """Sequences of random tokens, of which all but 16 are trained."""
    return pack(
        [
            Episode(prompt_ids=ids[:16], response_ids=ids[16:], reward=1.0, advantage=float(i % 2) - 0.5)
            for i, ids in enumerate(prompts(count, length, vocab, seed))
        ]
    )


def costs(variants: dict[str, dict[str, Any]], setup: Setup, model: Path | None = None) -> Iterator[Row]:
    """A GRPO step of 16 sequences of 2,048 tokens with the settings of each variant, and its time over the first's."""
    length, count = (64, 4) if setup.quick else (2048, 16)
    folder = model or setup.model
    batch, loss = rows_of(length, count, 512 if model else setup.shape["vocab_size"]), GRPOLoss()
    taken = list[float]()
    for who, settings in variants.items():
        forget_memory(setup)
        policy = trainer(folder, setup.dtype, 4 * length, **settings)
        start = time.perf_counter()
        policy.train_step(batch, loss)
        synchronize(setup)
        first = time.perf_counter() - start
        taken.append(repeated(lambda: policy.train_step(batch, loss), setup))  # noqa: B023
        ratio = f", {taken[-1] / taken[0]:.2f} times the first's time" if len(taken) > 1 else ""
        figure = f"{first:.1f} s, {len(batch.tokens) / taken[-1]:,.0f}{most_memory(setup)}{ratio}"
        yield Row(f"{who}, {count} x {length}: first step, tokens/s", figure)
        forget_memory(setup)


def four_bits(setup: Setup) -> Iterator[Row]:
    """Adapters over a frozen model in four bits, alongside the same model as it is."""
    if not find_spec("bitsandbytes"):
        yield Row("adapters over four bits", "bitsandbytes is not installed here")
        return
    from forge_families.four_bits import round_model

    model = Path(round_model(str(setup.model), str(setup.folder / "four_bits"), None))
    yield from costs({"adapters": {"lora": {}}, "adapters over four bits": {"lora": {"quantize": "nf4"}}}, setup, model)


def families(name: str, setup: Setup) -> Iterator[Row]:
    """A model of a family's published shape with random weights: how far its engine and its trainer are apart, tokens a
    second of both."""
    config, kind, sizes, tiny = FAMILIES[name]
    folder = setup.folder / name
    parameters = build(folder, config(**(tiny if setup.size == "tiny" else sizes)), kind, torch.bfloat16)
    slots, tokens = (4, 8) if setup.quick else (64, 64)
    forget_memory(setup)
    engine = load_engine("embedded", folder, slots=slots, max_seq_len=256, dtype=setup.dtype)
    contexts = prompts(slots, 32, 512)
    try:
        seconds = repeated(lambda: generated(engine, contexts, tokens), setup, times=1)
        drawn = generated(engine, contexts, tokens)
    finally:
        engine.close()
    what = f"{name}, {parameters / 1e6:,.0f}M"
    yield Row(
        f"{what}, batch {slots}: tokens/s, step", f"{slots * tokens / seconds:,.0f}, {1e3 * seconds / tokens:.1f} ms"
    )
    batch = pack([Episode(completion, 0.0, advantage=1.0) for completion in drawn])
    ours = torch.tensor([logprob for completion in drawn for logprob in completion.logprobs])
    found = torch.from_numpy(trainer(folder, setup.dtype).logprobs(batch)[batch.mask])
    most = 5e-2 if setup.on_gpu else 1e-4
    yield Row.at_most(f"{what}: engine and trainer apart, mean", float((ours - found).abs().mean()), most)
    yield from costs({what: {}}, setup, folder)


def adapters(setup: Setup) -> Iterator[Row]:
    """A step of adapters with causal kernels, of two micro-batches, alongside prime-rl's figures on the same card."""
    length = 256 if setup.quick else 65_536
    forget_memory(setup)
    policy = trainer(setup.model, setup.dtype, length, lora={"rank": 16}, gradient_checkpointing=True)
    batch, loss = rows_of(length, 2, setup.shape["vocab_size"]), GRPOLoss()
    rate = len(batch.tokens) / repeated(lambda: policy.train_step(batch, loss), setup, times=1)
    least, _ = PUBLISHED
    comparable = setup.real and setup.size == "0.6b"
    figure = f"{rate:,.0f}{most_memory(setup)}"
    limit = f"prime-rl {least:,}, {PUBLISHED[1]} GiB" if comparable else ""
    yield Row(f"adapters of rank 16, {length:,} x 2: tokens/s", figure, limit, not comparable or rate >= least)


def weight_sync(setup: Setup) -> Iterator[Row]:
    """Seconds from a trainer's weights to an engine that decodes with them, through the store."""
    policy, dtype = trainer(setup.model, setup.dtype), getattr(torch, setup.dtype)
    store, numbers = VersionStore.create(), itertools.count(1)
    try:
        for name, kind, settings in engine_cases(setup):
            engine = load_engine(kind, setup.model, slots=8, max_seq_len=256, dtype=setup.dtype, **settings)
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
