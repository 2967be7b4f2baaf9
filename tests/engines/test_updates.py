"""Weight updates under running sequences, each mode against a loop by hand with the right weights for every token."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from forge.engines import EmbeddedEngine
from forge.engines.sampling import draw_uniforms
from forge.types import Completion, Sampling

from .conftest import EOS, MODES, VOCAB, check_by_hand, check_shape, drive, error_of, updater

pytestmark = pytest.mark.costly


def check_draws(models: dict[int, PreTrainedModel], completion: Completion, seed: int, sample: int) -> None:
    """Every token is the one its number of the seeded stream picks: for sequences with no old keys and values."""
    numbers = draw_uniforms(seed, sample, len(completion.token_ids))
    for i, (token, version) in enumerate(zip(completion.token_ids, completion.versions, strict=True)):
        with torch.no_grad():
            prefix = torch.tensor([[*completion.prompt_ids, *completion.token_ids[:i]]])
            total = models[version](prefix).logits[0, -1].softmax(-1).cumsum(-1)
        low = float(total[token - 1]) if token else 0.0
        assert low - 1e-5 <= float(numbers[i]) <= float(total[token]) + 1e-5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [16, pytest.param(4096, marks=pytest.mark.full)])
def test_each_token_is_sampled_from_its_recorded_weight_version(
    models: tuple[Path, dict[int, PreTrainedModel]], mode: str, budget: int
) -> None:
    folder, by_version = models
    with EmbeddedEngine(folder, slots=5, on_update=mode, prefill_tokens=budget) as engine:
        updates: list[Any] = []
        drive(engine, {6: updater(engine, by_version, updates, 1), 13: updater(engine, by_version, updates, 2)})
        rng = random.Random(0)
        requests = [
            ([rng.randrange(VOCAB) for _ in range(length)], Sampling(n, limit, stop_token_ids=stops, seed=length))
            for length, n, limit, stops in ((3, 7, 30, ()), (25, 2, 25, (7, 8)), (1, 3, 20, ()), (40, 2, 22, (11,)))
        ]
        results = [engine.submit(prompt, sampling) for prompt, sampling in requests]
        versions = []
        for future, (_, sampling) in zip(results, requests, strict=True):
            completions = future.result(30)
            check_shape(completions, sampling, {EOS, *sampling.stop_token_ids})
            for sample, completion in enumerate(completions):
                versions.append(tuple(dict.fromkeys(completion.versions)))
                assert completion.identities == {v: f"digest {v}" if v else "" for v in completion.versions}
                check_by_hand(by_version, completion, keep=mode == "continue")
                if mode != "continue":
                    check_draws(by_version, completion, sampling.seed or 0, sample)
        assert [update.result(30) for update in updates] == [None, None]
        assert (engine.version, engine.identity) == (2, "digest 2")
        mixed = [v for v in versions if len(v) > 1]
        assert not mixed if mode == "finish" else mixed
        assert engine.stats()["running"] == engine.stats()["waiting"] == 0


def test_on_update_finish_applies_weights_after_running_requests(
    models: tuple[Path, dict[int, PreTrainedModel]],
) -> None:
    folder, by_version = models
    order: list[str] = []
    with EmbeddedEngine(folder, slots=4, on_update="finish") as engine:
        futures: list[Any] = []

        def both() -> None:
            for version in (1, 2):
                updater(engine, by_version, futures, version)()
                futures[-1].add_done_callback(lambda _, v=version: order.append(f"update {v}"))

        drive(engine, {3: both})
        old = engine.submit([1, 2], Sampling(n=2, max_tokens=30, seed=1))
        # Of eight samples two start under the old weights, the others wait although rows become free.
        group = engine.submit([3, 4], Sampling(n=8, max_tokens=12, seed=2))
        old.add_done_callback(lambda _: order.append("old"))
        assert [set(c.versions) for c in group.result(30)] == [{0}, {0}, *[{2}] * 6]
        assert all(c.identities == {2: "digest 2"} for c in group.result()[2:])
        assert all(set(c.versions) == {0} for c in old.result(30))
        assert max(error_of(by_version[2], c) for c in group.result()[2:]) < 1e-4
        # The newest wins; both futures complete in order, when it is in use.
        assert order == ["old", "update 1", "update 2"]


@pytest.mark.parametrize("mode", MODES)
def test_cancelled_request_does_not_disturb_weight_update(
    models: tuple[Path, dict[int, PreTrainedModel]], mode: str
) -> None:
    folder, by_version = models
    with EmbeddedEngine(folder, slots=4, on_update=mode, prefill_tokens=8) as engine:
        futures: list[Any] = []
        gone = engine.submit([5] * 20, Sampling(n=4, max_tokens=70, temperature=0))
        kept = engine.submit([6, 7], Sampling(n=3, max_tokens=15, seed=3))
        drive(engine, {5: updater(engine, by_version, futures, 1), 6: gone.cancel})
        completions = kept.result(30)
        assert futures[0].result(30) is None
        assert all(set(c.versions) == {1} for c in completions)
        assert max(error_of(by_version[1], c) for c in completions) < 1e-4
        assert gone.cancelled()
