"""The prefix cache: what it saves, and that no request's bits depend on it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from forge.engines import EmbeddedEngine
from forge.engines.prefixes import TOKENS, PrefixCache
from forge.types import Sampling
from tests.engines.test_invariance import MODELS, bits, prompt_of, save

# A prompt is a path: where it leaves each earlier one, and how it goes on.
trees = st.lists(
    st.tuples(
        st.integers(0, 5),  # the prompt that it begins as
        st.sampled_from([0, 1, 15, 16, 17, 40, 64, 130]),  # up to here
        st.sampled_from([1, 2, 15, 16, 17, 33, 100]),  # own tokens
        st.sampled_from([1, 1, 3]),  # samples
        st.booleans(),  # wait for the answer first
    ),
    min_size=2,
    max_size=8,
)


def prompts_of(tree: list, vocab: int) -> list[list[int]]:
    prompts: list[list[int]] = []
    for i, (which, shared, own, *_) in enumerate(tree):
        start = prompts[which % len(prompts)][:shared] if prompts else []
        prompts.append(start + prompt_of(own, 100 + i, vocab))
    return prompts


@pytest.mark.costly
@pytest.mark.parametrize(
    "name",
    [
        "odd",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("experts", "windows", "wide")),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("joint", "partial", "tall")),
    ],
)
def test_prefix_reuse_does_not_change_token_or_logprob_bits(tmp_path: Path, name: str):
    save(tmp_path, name)
    vocab = MODELS[name][-1]
    how: dict[str, Any] = {"device": "cpu", "router_replay": name == "experts"}
    plain = EmbeddedEngine(tmp_path, slots=1, prefix_cache_mb=0, **how)
    shapes = ({"slots": 3}, {"slots": 13, "prefill_tokens": 37}, {"slots": 8, "prefix_cache_mb": 0.05})
    others = [EmbeddedEngine(tmp_path, **how, **shape) for shape in shapes]

    @settings(max_examples=15, derandomize=True)
    @given(trees)
    def check(tree: list) -> None:
        samplings = [Sampling(n, 6, seed=seed) for seed, (*_, n, _) in enumerate(tree)]
        asked = list(zip(prompts_of(tree, vocab), samplings, strict=True))
        expected = [plain.submit(*each).result(60) for each in asked]
        for engine in others:
            futures = []
            for each, (*_, wait) in zip(asked, tree, strict=True):
                futures.append(engine.submit(*each))
                if wait:
                    futures[-1].result(60)
            for wanted, future in zip(expected, futures, strict=True):
                found = future.result(60)
                assert bits(found) == bits(wanted)
                for a, b in zip(found, wanted, strict=True):
                    np.testing.assert_array_equal(a.experts, b.experts)

    try:
        check()
        assert all(engine.stats()["reused_tokens"] > 0 for engine in others)
    finally:
        for engine in (plain, *others):
            engine.close()


@pytest.mark.parametrize("prefill_tokens", [4096, 20])
def test_multi_turn_episode_prefills_each_token_once(tmp_path: Path, prefill_tokens: int):
    save(tmp_path, "even")
    with EmbeddedEngine(tmp_path, slots=2, device="cpu", prefill_tokens=prefill_tokens) as engine:
        prompt = prompt_of(50, 0, 61)
        for turn in range(8):
            before = engine.stats()
            (answer,) = engine.submit(prompt, Sampling(max_tokens=12, seed=turn)).result(60)
            after = engine.stats()
            computed = after["prefilled_tokens"] - before["prefilled_tokens"]
            assert computed + after["reused_tokens"] - before["reused_tokens"] == len(prompt) - 1
            # The answer before, what was said to it, and less than a block that was not whole.
            assert computed < (50 if turn == 0 else 12 + 20 + TOKENS)
            prompt = [*prompt, *answer.token_ids, *prompt_of(20, turn + 1, 61)]


def test_repeated_prompt_is_not_prefilled_again(tmp_path: Path):
    save(tmp_path, "even")
    with EmbeddedEngine(tmp_path, slots=4, device="cpu") as engine:
        prompt = prompt_of(4 * TOKENS + 1, 0, 61)
        first = bits(engine.submit(prompt, Sampling(n=6, max_tokens=5, seed=1)).result(60))
        assert bits(engine.submit(prompt, Sampling(n=6, max_tokens=5, seed=1)).result(60)) == first
        assert engine.stats()["prefilled_tokens"] == engine.stats()["reused_tokens"] == 4 * TOKENS


@pytest.mark.parametrize("mode", ["continue", "finish", "recompute"])
def test_cached_prefix_is_not_reused_after_weight_update(tmp_path: Path, mode: str):
    save(tmp_path, "even")
    second = save(tmp_path, "even", seed=2)
    prompt, sampling = prompt_of(70, 0, 61), Sampling(max_tokens=10, seed=3)
    with EmbeddedEngine(tmp_path, slots=2, device="cpu", on_update=mode) as engine:
        old = bits(engine.submit(prompt, sampling).result(60))
        engine.update_weights(second, 1, "second").result(60)
        new = bits(engine.submit(prompt, sampling).result(60))
        assert engine.stats()["reused_tokens"] == 0
        engine.release().result(60)
        engine.restore().result(60)
        engine.update_weights(second, 1, "second").result(60)
        assert bits(engine.submit(prompt, sampling).result(60)) == new != old
        assert engine.stats()["reused_tokens"] == 0


def test_prefix_cache_evicts_least_recently_used():
    cache = PrefixCache(3 * 8 * TOKENS)
    value = torch.zeros(1, 1, 2 * TOKENS, 1)
    first, second, third = ([n] * TOKENS for n in range(3))
    cache.add(first + second, (value, value))
    cache.add(third, (value[:, :, :TOKENS], value[:, :, :TOKENS]))
    cache.find(first + second)
    cache.add([4] * TOKENS, (value[:, :, :TOKENS], value[:, :, :TOKENS]))
    assert [len(cache.find(tokens)) for tokens in (first + second, third, [4] * TOKENS)] == [2, 0, 1]
