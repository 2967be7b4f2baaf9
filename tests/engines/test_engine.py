"""Scheduling, weight updates and failures of the embedded engine."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.engines import EmbeddedEngine
from forge.engines.interface import EngineFailed
from forge.types import Sampling

from .conformance.conftest import Hold
from .conftest import EOS, VOCAB, Make, check_shape, error_of, random_model


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited 20 s in vain"
        time.sleep(0.001)


def test_a_group_is_prefilled_once_even_when_it_is_admitted_in_parts(make: Make) -> None:
    folder, model = make("llama")
    with EmbeddedEngine(folder, slots=4) as engine:
        completions = engine.submit(list(range(20)), Sampling(n=11, max_tokens=6, seed=0)).result(30)
        assert max(error_of(model, c) for c in completions) < 1e-4
        assert len({tuple(c.token_ids) for c in completions}) > 1
        stats = engine.stats()
    assert stats["prefilled_tokens"] == 19
    assert stats["generated_tokens"] == 66
    assert stats["decode_steps"] == 18
    assert stats["running"] == stats["waiting"] == 0


def test_freed_slots_are_reused_at_once_and_in_order(make: Make) -> None:
    folder, model = make("qwen2")
    order: list[int] = []
    with EmbeddedEngine(folder, slots=3) as engine:
        blocker = engine.submit([1], Sampling(n=3, max_tokens=30, seed=0))
        lengths = [3, 40, 5, 9, 1, 22, 2, 2, 31, 4]
        futures = [engine.submit([i, i + 1], Sampling(max_tokens=m, seed=i)) for i, m in enumerate(lengths)]
        for i, future in enumerate(futures):
            future.add_done_callback(partial(lambda i, _: order.append(i), i))
        assert max(error_of(model, future.result(30)[0]) for future in futures) < 1e-4
        assert [len(future.result()[0].token_ids) for future in futures] == lengths
        steps = engine.stats()["decode_steps"]
        blocker.result()
    # A simulation of three slots filled first come, first served.
    free, ends = [30, 30, 30], []
    for length in lengths:
        start = min(free)
        free[free.index(start)] = start + length
        ends.append(start + length)
    assert steps == max(ends)
    assert [ends[i] for i in order] == sorted(ends)


def test_a_cancelled_request_leaves_its_rows_at_once(make: Make) -> None:
    folder, _ = make("llama", max_position_embeddings=1024)
    hold = Hold()
    with EmbeddedEngine(folder, slots=2) as engine:
        running = engine.submit([1, 2, 3], Sampling(n=2, max_tokens=1000, seed=0), listener=hold)
        assert hold.holds.wait(60)
        assert running.cancel()
        hold.release()
        wait_for(lambda: engine.stats()["running"] == 0)
        assert engine.stats()["decode_steps"] < 100


def test_update_in_mid_generation(make: Make) -> None:
    folder, old = make("llama")
    new = random_model("llama", seed=1)
    with EmbeddedEngine(folder, slots=2) as engine:
        running = engine.submit([1, 2, 3], Sampling(n=5, max_tokens=90, seed=0))
        wait_for(lambda: engine.stats()["decode_steps"] > 5)
        engine.update_weights(new.state_dict().items(), 1).result(30)
        completions = running.result(30)
        mixed = [c for c in completions if len(set(c.versions)) == 2]
        assert mixed
        for completion in mixed:
            assert completion.versions == sorted(completion.versions)
            assert completion.version == 0
            first = completion.versions.index(1)
            completion.token_ids, completion.logprobs = completion.token_ids[:first], completion.logprobs[:first]
            assert error_of(old, completion) < 1e-4
        # Samples of the same group that started later: not from the stored prompt of the old weights.
        late = [c for c in completions if set(c.versions) == {1}]
        assert late
        assert max(error_of(new, c) for c in late) < 1e-4
        assert engine.stats()["prefilled_tokens"] == 4


def test_a_failing_thread_fails_every_caller(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_callback_may_submit_and_close(make: Make) -> None:
    folder, _ = make()
    engine = EmbeddedEngine(folder, slots=2)
    follow_up = []
    done = threading.Event()

    def callback(_: object) -> None:
        follow_up.append(engine.submit([1], Sampling(max_tokens=2)))
        engine.close()
        done.set()

    engine.submit([1], Sampling(max_tokens=2)).add_done_callback(callback)
    assert done.wait(20)
    assert "closed" in str(follow_up[0].exception(10))


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
def test_any_mix_of_requests(make: Make) -> None:
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
def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, forge.engines; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)
