"""Scheduling, weight updates and failures of the embedded engine."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.engines import EmbeddedEngine
from forge.types import Sampling

from .conftest import EOS, VOCAB, Make, check_shape, error_of, random_model


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited 20 s in vain"
        time.sleep(0.001)


def test_stop_tokens_and_limits(make: Make) -> None:
    folder, _ = make(eos=EOS)
    with EmbeddedEngine(folder, slots=16, max_seq_len=40) as engine:
        for stops in ((), (7, 8, 9)):
            sampling = Sampling(n=40, max_tokens=25, temperature=1.5, stop_token_ids=stops, seed=1)
            completions = engine.submit([1, 2], sampling).result(30)
            check_shape(completions, sampling, {EOS, *stops})
            assert {c.finish for c in completions} == {"stop", "length"}
            assert all(c.prompt_ids == (1, 2) and c.text == "" for c in completions)
        long = engine.submit([5] * 39, Sampling(max_tokens=25)).result(30)[0]
        assert len(long.token_ids) == 1
        longer = engine.submit([5] * 30, Sampling(n=8, max_tokens=25)).result(30)
        assert all(len(c.token_ids) == 10 or c.finish == "stop" for c in longer)


@pytest.mark.parametrize(
    ("prompt", "message"), [([], "empty"), ([VOCAB], "token ids"), ([-1], "token ids"), ([1] * 96, "no room")]
)
def test_wrong_prompts_are_refused_at_once(make: Make, prompt: list[int], message: str) -> None:
    folder, _ = make()
    with EmbeddedEngine(folder, slots=2) as engine, pytest.raises(ValueError, match=message):
        engine.submit(prompt, Sampling())


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


def test_update_between_requests_uses_the_new_weights_exactly(make: Make) -> None:
    folder, _ = make("qwen3", True)
    new = random_model("qwen3", True, seed=1)
    with EmbeddedEngine(folder, slots=3, version=4) as engine:
        before = engine.submit([1, 2, 3], Sampling(max_tokens=8)).result(30)[0]
        assert set(before.versions) == {4}
        engine.update_weights(new.state_dict().items(), 5).result(30)
        assert engine.version == 5
        after = engine.submit([1, 2, 3], Sampling(max_tokens=8)).result(30)[0]
        assert after.versions == [5] * 8
        assert error_of(new, after) < 1e-4


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


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "twice", "broken"])
def test_a_failed_update_changes_nothing(make: Make, fault: str) -> None:
    folder, old = make("qwen3")
    state = random_model("qwen3", seed=1).state_dict()
    name = "model.layers.2.mlp.up_proj.weight"
    named = list(state.items())
    if fault == "missing":
        named = [(n, t) for n, t in named if n != name]
    elif fault == "unknown":
        name = "model.layers.3.mlp.up_proj.weight"
        named.append((name, state["model.layers.2.mlp.up_proj.weight"]))
    elif fault == "shape":
        named = [(n, t[:, 1:] if n == name else t) for n, t in named]
    elif fault == "twice":
        named.append((name, state[name]))

    def stream():
        yield from named
        if fault == "broken":
            raise OSError(f"lost after {name}")

    with EmbeddedEngine(folder, slots=2) as engine:
        error = engine.update_weights(stream(), 1).exception(30)
        assert isinstance(error, OSError if fault == "broken" else ValueError)
        assert name in str(error)
        assert engine.version == 0
        completion = engine.submit([1, 2, 3], Sampling(max_tokens=8)).result(30)[0]
        assert error_of(old, completion) < 1e-4
        assert set(completion.versions) == {0}


def test_norm_vectors_are_not_broadcast(make: Make) -> None:
    folder, _ = make("qwen3")
    state = random_model("qwen3").state_dict()
    name = "model.layers.0.self_attn.q_norm.weight"
    with EmbeddedEngine(folder, slots=2) as engine:
        error = engine.update_weights({**state, name: state[name][:1]}.items(), 1).exception(30)
        assert name in str(error)


def test_many_callers_at_once(make: Make) -> None:
    folder, model = make("qwen2", eos=EOS)
    same = random_model("qwen2")  # so that every completion can be checked, whenever it ran
    with EmbeddedEngine(folder, slots=6) as engine:

        def caller(i: int) -> None:
            sampling = Sampling(n=1 + i % 3, max_tokens=3 + i % 11, seed=i)
            completions = engine.submit([i % VOCAB] * (1 + i % 7), sampling).result(60)
            check_shape(completions, sampling, {EOS})
            assert max(error_of(model, c) for c in completions) < 1e-4

        with ThreadPoolExecutor(8) as pool:
            jobs = [pool.submit(caller, i) for i in range(48)]
            updates = [engine.update_weights(same.state_dict().items(), version) for version in range(1, 6)]
            for job in jobs:
                job.result(60)
        for update in updates:
            update.result(30)
        assert engine.version == 5


def test_cancelling_frees_the_slots(make: Make) -> None:
    folder, model = make()
    with EmbeddedEngine(folder, slots=2) as engine:
        first = engine.submit([1], Sampling(n=2, max_tokens=90, seed=0))
        second = engine.submit([2], Sampling(n=2, max_tokens=90, seed=0))
        third = engine.submit([3, 4], Sampling(n=2, max_tokens=4, seed=0))
        wait_for(lambda: engine.stats()["running"] == 2)
        assert second.cancel()
        assert first.cancel()
        assert max(error_of(model, c) for c in third.result(30)) < 1e-4
        with pytest.raises(CancelledError):
            first.result(1)
        wait_for(lambda: engine.stats()["running"] == 0)
        assert engine.stats()["generated_tokens"] < 190


def test_close_fails_what_is_pending(make: Make) -> None:
    folder, _ = make()
    engine = EmbeddedEngine(folder, slots=1)
    futures = [engine.submit([1], Sampling(max_tokens=90)) for _ in range(20)]
    engine.close()
    engine.close()
    for future in futures:
        error = future.exception(5)
        assert error is None or "closed" in str(error)
    assert futures[-1].exception(5) is not None
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit([1], Sampling())
    assert "closed" in str(engine.update_weights([], 1).exception(5))
    assert not engine._thread.is_alive()


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
        futures = [engine.submit([1, 2], Sampling(n=3, max_tokens=50)) for _ in range(4)]
        for future in futures:
            assert isinstance(future.exception(10), MemoryError)
        with pytest.raises(MemoryError, match="in the test"):
            engine.submit([1], Sampling())
        state = random_model().state_dict().items()
        assert isinstance(engine.update_weights(state, 1).exception(10), MemoryError)


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


def test_any_mix_of_requests(make: Make) -> None:
    folder, model = make("qwen3", eos=EOS)

    with EmbeddedEngine(folder, slots=5, prefill_tokens=24) as engine:

        @settings(max_examples=40, deadline=None, derandomize=True)
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


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, forge.engines; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)
