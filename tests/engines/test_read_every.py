"""Ended rows that the host reads some steps later: the same samples, and what was drawn too much is discarded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forge.engines import EmbeddedEngine
from forge.engines.settings import EngineSettings
from forge.types import Completion, Sampling

from .conftest import VOCAB, drive, random_model

LONGEST = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers end at many lengths, as some tokens are stops."""
    folder = tmp_path_factory.mktemp("models")
    random_model("qwen3", max_position_embeddings=LONGEST, spread=0.1).save_pretrained(folder)
    return folder


def answers(engine: EmbeddedEngine, seed: int = 0) -> list[Completion]:
    """Completions of requests of all kinds that end by tokens, by lengths, or at the longest sequence."""
    random = np.random.default_rng(seed)
    stops = tuple(range(5, 5 + VOCAB // 30))
    kinds = [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"n": 3}, {"top_logprobs": 2}, {"repetition_penalty": 1.2}]
    futures = []
    for i in range(18):
        prompt = random.integers(5, VOCAB, random.integers(1, 60)).tolist()
        limit = int(random.choice([1, 4, 20, 2 * LONGEST]))
        settings = kinds[random.integers(len(kinds))]
        futures.append(engine.submit(prompt, Sampling(max_tokens=limit, seed=i, stop_token_ids=stops, **settings)))
    return [completion for future in futures for completion in future.result(120)]


@pytest.mark.parametrize("seed", range(3))
def test_samples_are_those_of_an_engine_that_reads_every_step(seed: int, folder: Path):
    with EmbeddedEngine(folder, slots=5, max_seq_len=LONGEST) as engine:
        expected = answers(engine, seed)
        assert engine.stats()["discarded_tokens"] == 0
    assert {completion.finish for completion in expected} == {"stop", "length"}
    for read_every in (3, 16, 1000):
        with EmbeddedEngine(folder, slots=5, max_seq_len=LONGEST, read_every=read_every) as engine:
            assert answers(engine, seed) == expected  # bit for bit, log-probabilities and versions too
            stats = engine.stats()
        assert stats["generated_tokens"] == sum(len(completion.token_ids) for completion in expected)
        assert stats["discarded_tokens"] > 0


def test_experts_are_those_of_an_engine_that_reads_every_step(tmp_path: Path):
    random_model("qwen3-moe", max_position_embeddings=LONGEST, spread=0.1).save_pretrained(tmp_path)
    settings = {"slots": 5, "max_seq_len": LONGEST, "router_replay": True}
    with EmbeddedEngine(tmp_path, **settings) as engine:
        expected = answers(engine)
    with EmbeddedEngine(tmp_path, read_every=5, **settings) as engine:
        for answer, other in zip(answers(engine), expected, strict=True):
            assert (answer.token_ids, answer.logprobs) == (other.token_ids, other.logprobs)
            np.testing.assert_array_equal(answer.experts, other.experts)


def test_prompts_that_wait_are_computed_at_every_step(folder: Path):
    steps = []
    for read_every in (1, 8):
        with EmbeddedEngine(
            folder, slots=16, max_seq_len=LONGEST, prefill_tokens=128, prefix_cache_mb=0, read_every=read_every
        ) as engine:
            with engine._wake:
                futures = [engine.submit([5 + i] * 100, Sampling(max_tokens=40, seed=i)) for i in range(16)]
                futures.append(engine.submit([4] * 150, Sampling(max_tokens=40, seed=99)))
            [future.result(60) for future in futures]
            steps.append(engine.stats()["decode_steps"])
    # Without, a prompt would be computed every eighth step, and the last one begin at step 128.
    assert steps[1] <= steps[0] + 8


def test_generated_tokens_grow(folder: Path):
    counts = []
    with EmbeddedEngine(folder, slots=4, max_seq_len=LONGEST, read_every=64) as engine:
        future = engine.submit([5], Sampling(n=40, max_tokens=LONGEST, stop_token_ids=tuple(range(5, 9)), seed=0))
        while not future.done():
            counts.append(engine.stats()["generated_tokens"])
        assert sum(len(completion.token_ids) for completion in future.result()) == engine.stats()["generated_tokens"]
    assert counts == sorted(counts)


def test_no_step_is_beyond_the_longest_answer(folder: Path):
    with EmbeddedEngine(folder, slots=4, max_seq_len=LONGEST, read_every=16) as engine:
        with engine._wake:  # both at once, so that the same step admits them
            futures = [engine.submit([5, 6, i], Sampling(max_tokens=i, seed=0)) for i in (3, 21)]
        assert [len(completion.token_ids) for future in futures for completion in future.result(60)] == [3, 21]
        assert engine.stats()["decode_steps"] == 21


@pytest.mark.parametrize("on_update", ["continue", "recompute"])
def test_versions_are_those_of_the_weights_that_drew(on_update: str, folder: Path):
    later = random_model("qwen3", max_position_embeddings=LONGEST, spread=0.1, seed=1).state_dict()
    with EmbeddedEngine(folder, slots=4, max_seq_len=LONGEST, read_every=4, on_update=on_update) as engine:
        drive(engine, {8: lambda: engine.update_weights(later.items(), 1, "one")})
        (completion,) = engine.submit([5, 6, 7], Sampling(max_tokens=21, seed=0)).result(60)
    assert completion.versions == [0] * 8 + [1] * 13
    assert completion.identities == {0: "", 1: "one"}


def test_a_cancelled_request_frees_its_rows(folder: Path):
    with EmbeddedEngine(folder, slots=2, max_seq_len=LONGEST, read_every=8) as engine:
        cancelled = engine.submit([5, 6], Sampling(n=2, max_tokens=LONGEST, seed=0))
        waiting = engine.submit([7], Sampling(max_tokens=5, seed=1))
        cancelled.cancel()
        (completion,) = waiting.result(60)
    with EmbeddedEngine(folder, slots=2, max_seq_len=LONGEST) as engine:
        assert engine.submit([7], Sampling(max_tokens=5, seed=1)).result(60) == [completion]


def test_vllm_has_none():
    with pytest.raises(ValueError, match=r"generator.read_every is of the embedded engine"):
        EngineSettings(engine="vllm", read_every=8)
