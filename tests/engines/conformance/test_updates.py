"""New weights: taken up whole or not at all, and every token says which it is of."""

import time
from typing import Any

import pytest

from forge.types import Sampling

from ..conftest import EOS, check_by_hand, check_shape, error_of
from .conftest import SLOTS, Hold, Subject, build, digest, wait_for

pytestmark = pytest.mark.costly

MODES = ("continue", "finish", "recompute")


def test_weight_updates_between_requests_take_effect(subject: Subject, engine: Any) -> None:
    for version in (0, 1, 2):
        subject.update(version).result(60)
        assert (engine.version, engine.identity) == (version, digest(version))
        completion = engine.submit([1, 2, 3], Sampling(max_tokens=8, seed=4)).result(60)[0]
        assert set(completion.versions) == {version}
        assert completion.identities == {version: digest(version)}
        assert error_of(subject.models[version], completion) < 1e-4


@pytest.mark.parametrize(
    "mode", ["continue", *(pytest.param(mode, marks=pytest.mark.full) for mode in ("finish", "recompute"))]
)
def test_tokens_match_recorded_weight_versions_under_load(subject: Subject, engine: Any, mode: str) -> None:
    engine.on_update = mode
    sampling = Sampling(n=6, max_tokens=300, temperature=1.0, seed=1)
    # More than there are slots; the second prompt fills more than one block of vLLM's cache.
    requests = [[1, 2, 3], [4, 5] * 90, [6], [7, 8, 9, 10]]
    futures = [engine.submit(requests[0], sampling, listener=(hold := Hold(pieces=60)))]
    futures += [engine.submit(prompt, sampling) for prompt in requests[1:]]
    wait_for(hold.holds.is_set)
    for version in (1, 2):
        update = subject.update(version)
        hold.release()
        update.result(60)
        assert engine.version == version
        time.sleep(0.02)
    seen = []
    for future in futures:
        completions = future.result(60)
        check_shape(completions, sampling, {EOS})
        for completion in completions:
            seen.append(tuple(dict.fromkeys(completion.versions)))
            assert completion.identities == {v: digest(v) for v in set(completion.versions)}
            check_by_hand(subject.models, completion, keep=mode == "continue")
    # Which of the new versions draws depends on the load: one may be replaced before the engine gets a core.
    assert {0, 1, 2} >= set(sum(seen, ())) > {0}
    assert any(len(versions) > 1 for versions in seen) == (mode != "finish")


@pytest.mark.parametrize("mode", MODES)
def test_cached_prefixes_are_dropped_after_weight_update(subject: Subject, engine: Any, mode: str) -> None:
    engine.on_update = mode
    prompt = [i % 61 for i in range(300)]
    long = engine.submit(prompt, Sampling(n=SLOTS, max_tokens=60, seed=2), listener=(hold := Hold()))
    waiting = engine.submit(prompt, Sampling(n=2, max_tokens=5, seed=3))
    wait_for(hold.holds.is_set)
    update = subject.update(1)
    hold.release()
    update.result(60)
    after = engine.submit(prompt, Sampling(n=2, max_tokens=5, seed=3))
    for completion in (*waiting.result(60), *after.result(60)):
        assert set(completion.versions) == {1}
        assert error_of(subject.models[1], completion) < 1e-4
    long.result(60)


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "broadcast", "twice", "broken"])
def test_failed_weight_update_keeps_previous_engine_weights(subject: Subject, engine: Any, fault: str) -> None:
    state = build(seed=1).state_dict()
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "broadcast":
        name = "model.layers.0.self_attn.q_norm.weight"
    named = list(state.items())
    if fault == "missing":
        named = [(n, t) for n, t in named if n != name]
    elif fault == "unknown":
        name = "model.layers.2.mlp.up_proj.weight"
        named.append((name, state["model.layers.1.mlp.up_proj.weight"]))
    elif fault == "shape":
        named = [(n, t[:, 1:] if n == name else t) for n, t in named]
    elif fault == "broadcast":
        named = [(n, t[:1] if n == name else t) for n, t in named]
    elif fault == "twice":
        named.append((name, state[name]))

    def stream() -> Any:
        yield from named
        if fault == "broken":
            raise OSError(f"lost after {name}")

    error = engine.update_weights(stream(), 1).exception(60)
    assert isinstance(error, OSError if fault == "broken" else ValueError)
    assert name in str(error)
    assert engine.version == 0
    completion = engine.submit([1, 2, 3], Sampling(max_tokens=8)).result(60)[0]
    assert error_of(subject.models[0], completion) < 1e-4
    assert set(completion.versions) == {0}


@pytest.mark.parametrize("mode", MODES)
def test_engine_resumes_with_new_weights_after_release(subject: Subject, engine: Any, mode: str) -> None:
    engine.on_update = mode
    # Held once every sample has begun: one that has not waits for the next weights.
    hold = Hold(pieces=20)
    running = engine.submit([1, 2], Sampling(n=4, max_tokens=200, temperature=0), listener=hold)
    wait_for(hold.holds.is_set)
    released = engine.release()
    waiting = engine.submit([1, 2], Sampling(n=2, max_tokens=5, seed=1))
    hold.release()
    released.result(60)
    assert all(set(c.versions) == {0} for c in running.result(60))
    engine.release().result(60)
    if mode != "finish":  # an update does so by itself
        engine.restore().result(60)
    if mode == "recompute":
        engine.release().result(60)
    time.sleep(0.2)
    assert not waiting.done()
    assert engine.version == 0
    subject.update(1).result(60)
    for completion in waiting.result(60):
        assert set(completion.versions) == {1}
        assert error_of(subject.models[1], completion) < 1e-4
    engine.restore().result(60)  # of an engine that is not released: nothing
