"""The embedded engine on an emulated accelerator: the CPU's tokens, and one wait of the host a decode step."""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from forge.engines import EmbeddedEngine
from forge.engines.cache import token_bytes
from forge.types import Completion, Sampling
from tests.emulated import emulated, lines

from .conftest import VOCAB, random_model
from .test_updates import MODES, drive

LONGEST = 400  # the cache grows on the way
LOGPROBS = 1e-5  # largest difference to the CPU; measured 1e-6, and 6e-6 in Gemma
SAMPLINGS: list[dict[str, Any]] = [
    {"n": 3},
    {"temperature": 0.0},
    {"top_p": 0.9},
    {"top_k": 5, "top_logprobs": 3},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
]
MODELS: dict[str, dict[str, Any]] = {
    family: {"family": family, "max_position_embeddings": LONGEST, "spread": 0.1}
    for family in ("qwen3", "qwen3-moe", "gemma3")
}


class Outcome(NamedTuple):
    """Completions in order, the tokens that a listener got, and the engine's numbers."""

    completions: list[Completion]
    streamed: list[list[int]]
    stats: dict[str, int]


def decode(folder: Path, on_update: str = "continue", **settings: Any) -> Outcome:
    """Requests of all kinds, a weight update on the way, and one after a release."""
    random, streamed = np.random.default_rng(0), list[list[int]]()
    shared = random.integers(5, VOCAB, 70).tolist()
    prompts = [shared + random.integers(5, VOCAB, length).tolist() for length in (1, 40, 170, 3, 9, 60)]
    later = {version: random_model(**MODELS[folder.name], seed=version).state_dict() for version in (1, 2)}
    updates: list[Any] = []
    with EmbeddedEngine(folder, slots=8, max_seq_len=LONGEST, on_update=on_update, **settings) as engine:
        drive(engine, {6: lambda: updates.append(engine.update_weights(later[1].items(), 1, "one"))})
        with engine._wake:  # all at once, so that the same step admits them
            futures = [
                engine.submit(prompt, Sampling(max_tokens=8 + 7 * i, seed=i, **SAMPLINGS[i % len(SAMPLINGS)]))
                for i, prompt in enumerate(prompts)
            ]
            listener = lambda _, piece: streamed.append(piece.token_ids)  # noqa: E731
            futures.append(engine.submit(shared, Sampling(max_tokens=9, seed=7), listener=listener))
        completions = [completion for future in futures for completion in future.result(60)]
        updates[0].result(60)
        most = engine.stats()
        engine.release().result(60)
        engine.restore().result(60)
        engine.update_weights(later[2].items(), 2, "two").result(60)
        completions += engine.submit(shared, Sampling(n=2, max_tokens=9, seed=8)).result(60)
        assert {version for completion in completions for version in completion.versions} == {0, 1, 2}
    return Outcome(completions, streamed, most)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("models")
    for family, sizes in MODELS.items():
        random_model(**sizes).save_pretrained(parent / family)
    return {family: parent / family for family in MODELS}


def assert_equal(found: Outcome, expected: Outcome) -> None:
    for ours, theirs in zip(found.completions, expected.completions, strict=True):
        assert (ours.token_ids, ours.versions) == (theirs.token_ids, theirs.versions)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=LOGPROBS)
        for top, other in zip(ours.top_logprobs, theirs.top_logprobs, strict=True):
            assert list(top) == list(other)
            np.testing.assert_allclose(list(top.values()), list(other.values()), rtol=0, atol=LOGPROBS)
        if theirs.experts is not None:
            np.testing.assert_array_equal(ours.experts, theirs.experts)
    assert (found.streamed, found.stats) == (expected.streamed, expected.stats)


@pytest.mark.full
@pytest.mark.parametrize("on_update", MODES)
def test_engine_on_emulated_device_samples_the_tokens_of_cpu(on_update: str, folders: dict[str, Path]):
    expected = decode(folders["qwen3"], on_update)
    with emulated():
        found = decode(folders["qwen3"], on_update)
    assert_equal(found, expected)


@pytest.mark.full
@pytest.mark.parametrize(("family", "settings"), [("qwen3-moe", {"router_replay": True}), ("gemma3", {})])
def test_moe_and_gemma3_on_emulated_device_sample_the_tokens_of_cpu(
    family: str, settings: dict[str, Any], folders: dict[str, Path]
):
    expected = decode(folders[family], **settings)
    with emulated():
        found = decode(folders[family], **settings)
    assert_equal(found, expected)


def test_engine_on_emulated_device_keeps_cache_gb_limit(folders: dict[str, Path]):
    config = random_model(**MODELS["qwen3"]).config
    budget = 5 * 512 * token_bytes(config, torch.float32)  # the dock and four of eight rows
    expected = decode(folders["qwen3"], cache_gb=budget / 1e9)
    with emulated():
        found = decode(folders["qwen3"], cache_gb=budget / 1e9)
    assert_equal(found, expected)
    assert found.stats["cache_bytes"] <= budget < decode(folders["qwen3"]).stats["cache_bytes"]


def check_waits(folder: Path, limit: int, listener: Any = None, **sampling: Any) -> None:
    """The host waits at most `limit` times a decode step; those of admission and of the end are the same for all."""
    counts, steps = list[Counter[str]](), list[int]()
    with emulated() as emulation, EmbeddedEngine(folder, slots=4) as engine:
        for tokens in (10, 50):
            before = engine.stats()["decode_steps"]
            with emulation.counted() as waits:
                asked = Sampling(n=3, max_tokens=tokens, seed=1, **sampling)
                engine.submit([5, 6, 7], asked, listener=listener).result(60)
            counts.append(waits)
            steps.append(engine.stats()["decode_steps"] - before)
    few, many = counts
    assert steps == [10, 50]
    assert (many - few).total() <= limit * (steps[1] - steps[0]), lines(many - few)


@pytest.mark.parametrize(
    ("limit", "how"),
    [
        (1, {}),
        (1, {"top_p": 0.9, "top_k": 7}),
        (1, {"temperature": 0.0}),
        (2, {"top_logprobs": 2}),
        (2, {"listener": lambda *_: None}),
    ],
)
def test_engine_decode_step_synchronises_with_host_once(limit: int, how: dict[str, Any], folders: dict[str, Path]):
    check_waits(folders["qwen3"], limit, **how)
