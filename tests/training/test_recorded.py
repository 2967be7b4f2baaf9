"""Every token is accounted for: what a step records of its tokens adds up to what it reports."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from forge.algorithms import load_algorithm
from forge.algorithms.base import Aggregation
from forge.training import credit
from forge.types import Batch, Episode, Group
from tests.training.cases import VOCAB, example, make_trainer
from tests.training.ranks import LOSS, recorded_step

TOLERANCE = 1e-5  # relative: sums of float32 in another order

Algorithms = [
    ("grpo", {"clip_low": 0.1, "clip_high": 0.1}),
    ("grpo", {"beta": 0.05, "entropy_coef": 0.01}),
    ("dr_grpo", {}),
    ("dapo", {}),
    ("gspo", {}),
    ("cispo", {}),
    ("sapo", {}),
    ("rloo", {}),
]


def check_sums(metrics: dict[str, float], batch: Batch, recorded: dict[str, np.ndarray]) -> None:
    """The sums and means over tokens are the metrics of the step."""
    trained = ~np.isnan(recorded["logprobs"])
    assert trained.sum() == batch.mask.sum()
    assert metrics["tokens"] == len(batch.tokens)
    total = recorded["loss"][trained].astype(np.float64).sum()
    assert total == pytest.approx(metrics["loss"], rel=TOLERANCE, abs=1e-6)
    for name in ("entropy", "ratio", "clip_fraction", "correction_fraction"):
        if name in metrics:
            mean = recorded[name][trained].astype(np.float64).mean()
            assert mean == pytest.approx(metrics[name], rel=TOLERANCE, abs=1e-7), name
        else:
            assert np.isnan(recorded[name]).all()


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize(
    "settings", [{}, {"mini_batches": 2}, {"mini_batches": 2, "epochs": 2, "seq_len": 16}], ids=str
)
@pytest.mark.parametrize(("name", "fields"), Algorithms, ids=lambda value: str(value))
def test_recorded_token_metrics_sum_to_step_metrics(
    model: Path, name: str, fields: dict[str, Any], settings: dict[str, Any], aggregation: Aggregation
):
    trainer = make_trainer(model, **settings)
    metrics, batch, recorded = recorded_step(trainer, load_algorithm(name, **fields), aggregation)
    assert metrics["updates"] == settings.get("mini_batches", 1) * settings.get("epochs", 1)
    check_sums(metrics, batch, recorded)


def test_recording_tokens_does_not_change_step_metrics(model: Path):
    plain, recording = make_trainer(model, mini_batches=2), make_trainer(model, mini_batches=2)
    batch = example()
    batch.tokens[8] = batch.tokens[0]
    expected = plain.train_step(batch, LOSS)
    assert plain.recorded is None
    metrics, _, _ = recorded_step(recording, LOSS, "token_mean")
    assert metrics == expected


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0.0, 1.0])), min_size=2, max_size=4), min_size=1)
)
def test_recorded_token_metrics_match_episodes_when_groups_are_dropped(given: list[list[tuple[int, float]]]):
    """Groups without signal leave the batch; the others keep the numbers of their tokens and of their group."""
    groups = [
        Group([Episode(prompt_ids=[3, 4], response_ids=[5] * n, reward=r, versions=[0] * n) for n, r in group], index)
        for index, group in enumerate(given)
    ]
    for group in groups:
        for number, episode in enumerate(group.episodes):
            episode.tokens = [(group.index * 7 + number) % VOCAB + 3] * len(episode.tokens)
    wanted = groups[::2]
    batch = credit.make_batch(groups[::-1], load_algorithm("grpo"), 0, wanted, aggregation="token_mean")
    flat = np.concatenate([e.tokens for group in wanted for e in group.episodes])
    there = batch.recorded >= 0
    np.testing.assert_array_equal(batch.tokens[there], flat[batch.recorded[there]])
    assert len(set(batch.recorded[there].tolist())) == there.sum()
    for tokens, number in zip(np.split(batch.tokens, np.cumsum(batch.lengths)[:-1]), batch.groups, strict=True):
        assert tokens.tolist() in [episode.tokens for episode in groups[number].episodes]
    assert credit.make_batch(groups[::-1], load_algorithm("grpo"), 0, aggregation="token_mean").recorded is None
