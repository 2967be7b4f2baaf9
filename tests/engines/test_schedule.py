"""Schedules: an engine draws again, bit for bit, what others drew while their weights changed at any time."""

import random
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from forge.engines import EmbeddedEngine
from forge.types import Completion, Sampling, Spans

from .conftest import MODES, VOCAB, drive, updater

pytestmark = pytest.mark.costly
Models = tuple[Path, dict[int, PreTrainedModel]]


def spans_of(completion: Completion) -> Spans:
    """The versions of a completion, with the number of tokens that each drew."""
    return tuple((version, len([*tokens])) for version, tokens in groupby(completion.versions))


def requests_of(rng: random.Random, count: int) -> list[tuple[list[int], Sampling]]:
    """Requests of several samples, some with settings that rows keep track of."""
    requests = []
    for seed in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
        settings: dict[str, Any] = rng.choice(
            [{}, {"top_p": 0.9}, {"repetition_penalty": 1.2}, {"stop_token_ids": (7,)}]
        )
        requests.append((prompt, Sampling(rng.randint(1, 5), rng.randint(2, 30), seed=seed, **settings)))
    return requests


def recorded(
    models: Models, mode: str, requests: list[tuple[list[int], Sampling]], seed: int
) -> list[list[Completion]]:
    """What an engine draws while weights come at steps that the seed chooses."""
    folder, by_version = models
    rng = random.Random(seed)
    with EmbeddedEngine(folder, slots=5, on_update=mode, prefill_tokens=16) as engine:
        futures: list[Any] = []
        steps = sorted(rng.sample(range(2, 40), 3))
        drive(engine, {step: updater(engine, by_version, futures, v) for v, step in enumerate(steps, 1)})
        results = [engine.submit(prompt, sampling).result for prompt, sampling in requests]
        return [result(60) for result in results]


def replayed(
    models: Models, mode: str, requests: list[tuple[list[int], Sampling]], before: list[list[Completion]], slots: int
) -> list[list[Completion]]:
    """The same requests by the schedules of their completions, in another order and with other slots."""
    folder, by_version = models
    results: dict[int, Any] = {}
    order = [*range(len(requests))]
    random.Random(slots).shuffle(order)
    with EmbeddedEngine(folder, slots=slots, on_update=mode, prefill_tokens=64) as engine:
        for version in range(4):
            if version:
                engine.update_weights(by_version[version].state_dict().items(), version, f"digest {version}").result(60)
            for number in order:
                prompt, sampling = requests[number]
                schedule = tuple(map(spans_of, before[number]))
                if schedule[0][0][0] == version:
                    scheduled = {name: getattr(sampling, name) for name in sampling.__slots__} | {"schedule": schedule}
                    results[number] = engine.submit(prompt, Sampling(**scheduled))
        completions = [results[number].result(60) for number in range(len(requests))]
        stats = engine.stats()
        assert stats["running"] == stats["waiting"] == 0
    return completions


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(2))
def test_version_schedule_reproduces_tokens_with_any_slots(models: Models, mode: str, seed: int) -> None:
    requests = requests_of(random.Random(seed), 12)
    before = recorded(models, mode, requests, seed)
    assert len({version for group in before for c in group for version in c.versions}) > 1
    if mode != "finish":
        assert any(len(set(c.versions)) > 1 for group in before for c in group)
    for slots in (2, 9):
        assert replayed(models, mode, requests, before, slots) == before


def test_schedule_of_skipped_weight_version_error_names_versions(models: Models) -> None:
    folder, by_version = models
    with EmbeddedEngine(folder, slots=2) as engine:
        waits = engine.submit([1, 2], Sampling(2, 20, seed=4, schedule=(((0, 3), (1, 5)), ((2, 5),))))
        assert engine.update_weights(by_version[2].state_dict().items(), 2).result(30) is None
        with pytest.raises(ValueError, match="seed 4 wants version 1 next, and this engine serves version 2"):
            waits.result(30)
        late = engine.submit([1, 2], Sampling(1, 20, seed=5, schedule=(((1, 5),),)))
        with pytest.raises(ValueError, match="seed 5 wants version 1 next"):
            late.result(30)
        # The engine serves others.
        assert len(engine.submit([1, 2], Sampling(2, 4, seed=6)).result(30)) == 2
        assert engine.stats()["waiting"] == 0


@pytest.mark.parametrize(
    "schedule", [(((0, 3),),), (((1, 3), (0, 2)), ((0, 1),)), ((), ((0, 1),)), (((0, 0),), ((0, 1),))]
)
def test_invalid_version_schedule_spans_raise(schedule: Any) -> None:
    with pytest.raises(ValueError, match="schedule must have the spans of each of the 2 samples"):
        Sampling(2, schedule=schedule)
