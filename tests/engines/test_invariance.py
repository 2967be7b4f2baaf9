"""On a CPU in float32, a seeded request's tokens and log-probabilities are the same bits in any company."""

import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from forge.engines import EmbeddedEngine
from forge.types import Completion, Sampling

pytestmark = pytest.mark.costly

EXPERTS = {"num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
# family, hidden size, heads, key-value heads, head size, intermediate size, vocabulary. Groups of 1 to 7 heads, sums
# of more than 1024 products, sizes that fill no vector, products small enough for other kernels.
MODELS = {
    "even": (Qwen3Config, 64, 4, 2, 16, 192, 61),
    "single": (LlamaConfig, 64, 4, 4, 16, 100, 260),
    "wide": (Qwen3Config, 128, 8, 2, 32, 1152, 500),
    "odd": (Qwen3Config, 96, 7, 1, 32, 200, 61),
    "windows": (partial(Gemma3TextConfig, sliding_window=40, sliding_window_pattern=2), 96, 6, 1, 32, 200, 61),
    "joint": (Olmo2Config, 80, 5, 5, 16, 200, 61),  # norms of the whole projection
    "tall": (Qwen3Config, 48, 12, 1, 192, 100, 61),  # attention lengths of 256 on Intel's processors
    "experts": (partial(Qwen3MoeConfig, **EXPERTS), 96, 6, 2, 16, 200, 61),
    "partial": (partial(Phi3Config, pad_token_id=0, rope_parameters=HALF), 96, 4, 2, 24, 200, 61),
}
Bits = list[tuple[list[int], list[float], list[dict[int, float]]]]


def save(folder: Path, name: str, seed: int = 1) -> list[tuple[str, torch.Tensor]]:
    kind, hidden, heads, kv_heads, size, inner, vocab = MODELS[name]
    config = kind(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=size,
        max_position_embeddings=700,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, hidden**-0.5) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    if not (folder / "config.json").exists():
        model.save_pretrained(folder)
    return list(model.state_dict().items())


def bits(completions: list[Completion]) -> Bits:
    # Floats that are equal are the same bits here.
    return [(c.token_ids, c.logprobs, c.top_logprobs) for c in completions]


requests = st.tuples(
    st.sampled_from([1, 2, 3, 9, 17, 33, 63, 64, 65, 100, 129, 200, 300]),  # prompt length
    st.sampled_from([1, 1, 2, 5]),  # n
    st.sampled_from([1, 5, 20, 40]),  # max_tokens
    st.sampled_from([0.0, 0.7, 1.0, 2.0]),
    st.sampled_from([1.0, 0.8]),
    st.sampled_from([0, 5]),
    st.integers(0, 10**6),  # seed
    st.sampled_from([0, 0, 3]),  # top_logprobs
    st.sampled_from([0.0, 0.0, 0.002, 0.01]),  # seconds before it is submitted
)


def prompt_of(length: int, seed: int, vocab: int) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=length)


@pytest.mark.parametrize(
    "name", ["odd", *(pytest.param(name, marks=pytest.mark.full) for name in MODELS if name != "odd")]
)
def test_engine_tokens_are_bit_identical_in_any_batch(tmp_path: Path, name: str) -> None:
    save(tmp_path, name)
    vocab = MODELS[name][-1]
    alone = EmbeddedEngine(tmp_path, slots=1, device="cpu")
    shapes = ({"slots": 3}, {"slots": 13, "prefill_tokens": 37}, {"slots": 40, "max_seq_len": 410})
    others = [EmbeddedEngine(tmp_path, device="cpu", **shape) for shape in shapes]  # type: ignore[arg-type]

    @settings(max_examples=8, derandomize=True)
    @given(st.lists(requests, min_size=1, max_size=8), st.sampled_from(range(len(others))))
    def check(mix: list[Any], which: int) -> None:
        futures, expected = [], []
        for length, n, limit, temperature, top_p, top_k, seed, top, pause in mix:
            prompt = prompt_of(length, seed, vocab)
            sampling = Sampling(n, limit, temperature, top_p, top_k, seed=seed, top_logprobs=top)
            time.sleep(pause)
            futures.append(others[which].submit(prompt, sampling))
            expected.append((prompt, sampling))
        together = [bits(future.result(60)) for future in futures]
        for (prompt, sampling), found in zip(expected, together, strict=True):
            assert found == bits(alone.submit(prompt, sampling).result(60))

    try:
        check()
    finally:
        for engine in (alone, *others):
            engine.close()


@pytest.mark.parametrize("mode", ["finish", pytest.param("recompute", marks=pytest.mark.full)])
def test_engine_output_bits_are_independent_of_weight_update_path(tmp_path: Path, mode: str) -> None:
    first = save(tmp_path, "even")
    second = save(tmp_path, "even", seed=2)
    wanted = [([i, i + 1, 5] * (1 + 9 * i), Sampling(n=3, max_tokens=25, top_p=0.9, seed=i)) for i in range(6)]
    expected: dict[int, list[Bits]] = {}
    with EmbeddedEngine(tmp_path, slots=1, device="cpu") as engine:
        for version, state in enumerate((first, second)):
            engine.update_weights(state, version).result(30)
            expected[version] = [bits(engine.submit(p, s).result(30)) for p, s in wanted]
    seen = set()
    with EmbeddedEngine(tmp_path, slots=7, device="cpu", on_update=mode, prefill_tokens=50) as engine:
        futures = [engine.submit(p, s) for p, s in wanted]
        futures[0].result(30)
        update = engine.update_weights(second, 1, "second")
        futures += [engine.submit(p, s) for p, s in wanted]
        for i, future in enumerate(futures):
            for sample, completion in enumerate(future.result(30)):
                if len(set(completion.versions)) == 1:
                    seen.add(completion.version)
                    assert bits([completion])[0] == expected[completion.version][i % 6][sample]
        update.result(30)
    assert seen == {0, 1}
