"""Prompts that begin alike: a turn takes what the last one computed, under the same weights only."""

from typing import Any

from forge.types import Sampling

from ..conftest import error_of
from .conftest import Subject

FIRST = [i % 61 for i in range(290)]  # more than two blocks of vLLM's cache on a CPU, which have 128 tokens


def reused(engine: Any) -> int:
    return engine.stats()["reused_tokens"]


def test_next_turn_reuses_cached_prefix_of_previous_turn(subject: Subject, engine: Any) -> None:
    turn = engine.submit(FIRST, Sampling(max_tokens=20, seed=1)).result(60)[0]
    before = reused(engine)
    prompt = [*FIRST, *turn.token_ids, 7, 8, 9]
    following = engine.submit(prompt, Sampling(max_tokens=20, seed=2)).result(60)[0]
    assert reused(engine) - before >= 256
    assert following.prompt_ids == tuple(prompt)
    assert error_of(subject.models[0], following) < 1e-4


def test_weight_update_discards_cached_prefixes(subject: Subject, engine: Any) -> None:
    for mode in ("continue", "finish", "recompute"):
        engine.on_update = mode
        subject.update(0).result(60)
        turn = engine.submit(FIRST, Sampling(max_tokens=20, seed=1)).result(60)[0]
        subject.update(1).result(60)
        before = reused(engine)
        following = engine.submit([*FIRST, *turn.token_ids], Sampling(max_tokens=20, seed=2)).result(60)[0]
        assert reused(engine) == before
        assert set(following.versions) == {1}
        assert error_of(subject.models[1], following) < 1e-4
