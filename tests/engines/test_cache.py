"""The budget of keys and values: what it holds, who waits, and that no request's bits depend on it."""

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from forge.engines import EmbeddedEngine
from forge.engines.cache import make_zeros, token_bytes
from forge.types import Sampling
from tests.engines.conftest import drive
from tests.engines.test_invariance import MODELS, bits, prompt_of, save

LONGEST = 640
# Tokens of the prompt, of the answer, samples, and whether to wait for the answer first.
requests = st.lists(
    st.tuples(st.sampled_from([1, 5, 40, 130, 300]), st.integers(1, 340), st.integers(1, 5), st.booleans()),
    min_size=1,
    max_size=8,
)


def budget(engine: EmbeddedEngine, tokens: int) -> float:
    """The gigabytes of so many tokens of an engine's model."""
    return tokens * token_bytes(engine.config, engine.dtype) / 1e9


def played(engine: EmbeddedEngine, sizes: list, vocab: int) -> tuple[list, int]:
    """The bits of all answers, and the most bytes that the cache had while they were drawn."""
    most = 0

    def watch(sample: int, piece: Any) -> None:
        nonlocal most
        most = max(most, engine.stats()["cache_bytes"])

    futures = list[Future]()
    for i, (prompt, answer, n, wait) in enumerate(sizes):
        sampling = Sampling(n, min(answer, LONGEST - prompt), seed=i)
        futures.append(engine.submit(prompt_of(prompt, i, vocab), sampling, listener=watch))
        if wait:
            futures[-1].result(120)
    return [bits(future.result(120)) for future in futures], most


@pytest.mark.costly
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name != "odd" else name for name in ("odd", "experts", "tall")],
)
@pytest.mark.full
def test_cache_gb_limit_holds_and_tokens_are_unchanged(tmp_path: Path, name: str):
    save(tmp_path, name)
    vocab = MODELS[name][-1]
    common: dict[str, Any] = {"device": "cpu", "max_seq_len": LONGEST}
    with EmbeddedEngine(tmp_path, slots=16, **common) as plain:
        # Of three, five and 17 sequences of the longest kind.
        engines = [
            EmbeddedEngine(tmp_path, slots=16, cache_gb=budget(plain, tokens), **common, **more)
            for tokens, more in ((3 * LONGEST, {}), (5 * LONGEST, {"prefill_tokens": 37}), (17 * LONGEST, {}))
        ]

        @settings(max_examples=4, derandomize=True, deadline=None)
        @given(requests)
        def check(sizes: list) -> None:
            expected, free = played(plain, sizes, vocab)
            for engine, tokens in zip(engines, (3, 5, 17), strict=True):
                drawn, most = played(engine, sizes, vocab)
                assert drawn == expected
                assert most <= tokens * LONGEST * token_bytes(plain.config, plain.dtype)
            longest = max(prompt + min(answer, LONGEST - prompt) for prompt, answer, *_ in sizes)
            assert free >= token_bytes(plain.config, plain.dtype) * longest

        check()
        for engine in engines:
            engine.close()


def test_kv_cache_rows_are_freed_after_long_completions(tmp_path: Path):
    """Four of 640 tokens fit, or 15 of 128: after a long one, short ones run side by side again."""
    save(tmp_path, "odd")
    vocab = MODELS["odd"][-1]
    with EmbeddedEngine(tmp_path, slots=1, device="cpu", max_seq_len=LONGEST) as one:
        gigabytes = budget(one, 5 * LONGEST)
    with EmbeddedEngine(tmp_path, slots=16, device="cpu", max_seq_len=LONGEST, cache_gb=gigabytes) as engine:

        def steps(count: int, tokens: int) -> int:
            before = engine.stats()["decode_steps"]
            futures = [engine.submit(prompt_of(3, i, vocab), Sampling(1, tokens, seed=i)) for i in range(count)]
            for future in futures:
                future.result(120)
            return engine.stats()["decode_steps"] - before

        assert steps(16, 40) < 4 * 40
        assert steps(8, 600) >= 2 * 600
        assert steps(16, 40) < 4 * 40


def test_request_cancelled_while_later_rows_finish_keeps_other_tokens(tmp_path: Path):
    """With a budget, gaps are closed before rows are assigned: the cancelled row 5 is freed after rows 2 and 7."""
    save(tmp_path, "odd")
    vocab = MODELS["odd"][-1]
    lengths = [40, 40, 10, 40, 40, 40, 40, 10]
    with EmbeddedEngine(tmp_path, slots=8, device="cpu", max_seq_len=LONGEST, cache_gb=1) as engine:
        with engine._wake:  # all start in the same step
            futures = [
                engine.submit(prompt_of(3, i, vocab), Sampling(1, length, seed=i)) for i, length in enumerate(lengths)
            ]
            drive(engine, {10: futures.pop(5).cancel})
        answers = [future.result(60)[0] for future in futures]
        assert [len(answer.token_ids) for answer in answers] == lengths[:5] + lengths[6:]


def test_too_small_cache_gb_raises_one_line_error(tmp_path: Path):
    save(tmp_path, "odd")
    with pytest.raises(ValueError, match=r"generator.cache_gb: .* lower generator.max_seq_len or generator.slots$"):
        EmbeddedEngine(tmp_path, slots=4, device="cpu", max_seq_len=LONGEST, cache_gb=1e-6)


def test_make_zeros_allocates_memory_only_when_written():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    zeros = make_zeros((2, 256, 1 << 20), torch.bfloat16, torch.device("cpu"))
    zeros[:, :16] = 1
    assert zeros.nbytes == 1 << 30
    assert resident() - before < 1 << 28
    assert not zeros[:, 16].any()
    assert zeros[:, 15].all()
