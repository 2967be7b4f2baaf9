"""Scheduling, weight updates and failures of the embedded engine."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st

from forge.engines import EmbeddedEngine
from forge.engines.interface import EngineFailed
from forge.types import Sampling

from .conftest import EOS, VOCAB, Make, check_shape, error_of, random_model


def test_group_prompt_is_prefilled_once_when_admitted_in_parts(make: Make) -> None:
    folder, model = make("llama")
    with EmbeddedEngine(folder, slots=4) as engine:
        completions = engine.submit(list(range(20)), Sampling(n=11, max_tokens=6, seed=0)).result(30)
        assert max(error_of(model, c) for c in completions) < 1e-4
        assert len({tuple(c.token_ids) for c in completions}) > 1
        stats = engine.stats()
    assert (stats["prefilled_tokens"], stats["generated_tokens"], stats["decode_steps"]) == (19, 66, 18)
    assert stats["running"] == stats["waiting"] == 0


def test_failed_engine_thread_fails_every_caller(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = make()
    with EmbeddedEngine(folder, slots=2) as engine:
        decode = engine._batch.decoder.decode
        calls = 0

        def failing(*args: object) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls > 4:
                raise MemoryError("out of memory in the test")
            return decode(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(engine._batch.decoder, "decode", failing)
        with engine._wake:  # all of them before the fourth step
            futures = [engine.submit([1, 2], Sampling(n=3, max_tokens=50)) for _ in range(4)]
        for future in futures:
            assert isinstance(future.exception(10), EngineFailed)
        with pytest.raises(EngineFailed, match="MemoryError: out of memory in the test"):
            engine.submit([1], Sampling())
        state = random_model().state_dict().items()
        assert isinstance(engine.update_weights(state, 1).exception(10), EngineFailed)
        with pytest.raises(EngineFailed):
            engine.stats()


mixes = st.lists(
    st.tuples(
        st.integers(1, 30),  # prompt length
        st.integers(1, 7),  # n
        st.integers(1, 20),  # max_tokens
        st.sampled_from([0.0, 0.7, 2.0]),
        st.sampled_from([1.0, 0.5]),
        st.sampled_from([0, 3]),
        st.sets(st.integers(0, VOCAB - 1), max_size=9),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.costly
def test_concurrent_mixed_requests_match_transformers(make: Make) -> None:
    folder, model = make("qwen3", eos=EOS)

    with EmbeddedEngine(folder, slots=5, prefill_tokens=24) as engine:

        @settings(max_examples=40, derandomize=True)
        @given(mixes)
        def check(mix: list[tuple]) -> None:
            requests = [
                (length, Sampling(n, limit, temperature, p, k, tuple(stops), seed=length))
                for length, n, limit, temperature, p, k, stops in mix
            ]
            futures = [engine.submit([length] * length, sampling) for length, sampling in requests]
            for future, (_, sampling) in zip(futures, requests, strict=True):
                completions = future.result(60)
                check_shape(completions, sampling, {EOS, *sampling.stop_token_ids})
                if sampling.temperature == 0 or (sampling.top_p == 1 and sampling.top_k == 0):
                    assert error_of(model, completions[0], sampling.temperature or 1.0) < 1e-4

        check()


@pytest.mark.processes
def test_importing_engines_does_not_import_torch() -> None:
    code = "import sys, forge.engines; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)
