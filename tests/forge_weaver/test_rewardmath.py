"""Real scores of 30 verifiers, 240 problems, 10 candidates of which one is right; its figures are in docs/weaver.md."""

from pathlib import Path

import numpy as np
import pytest

from forge_weaver import (
    Auto,
    NaiveMean,
    PublishedWeaver,
    ScoreTable,
    families_by_name,
)
from forge_weaver.calibration import auc, ece
from forge_weaver.selection import selection_accuracy

FILE = Path(__file__).parents[2].parent / "shared" / "data" / "rewardmath_dev.npz"
pytestmark = [
    pytest.mark.skipif(not FILE.exists(), reason="no RewardMATH scores in ../shared/data"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def table() -> ScoreTable:
    with np.load(FILE, allow_pickle=False) as file:
        names = tuple(str(name) for name in file["verifiers"])
        return ScoreTable(file["scores"], names, labels=file["correct"], families=families_by_name(names))


def test_naive_and_published_selection_match_recorded_accuracy(table: ScoreTable):
    hidden = table.with_labels_of([])
    naive = NaiveMean().fit(hidden).predict_proba(hidden)
    assert selection_accuracy(naive, table.labels) == pytest.approx(0.31, abs=0.03)
    assert auc(naive, table.labels) == pytest.approx(0.68, abs=0.01)
    published = PublishedWeaver(class_balance=0.1).fit(hidden).predict_proba(hidden)
    assert selection_accuracy(published, table.labels) == pytest.approx(0.30, abs=0.03)


@pytest.mark.full
def test_auto_aggregator_without_labels_selects_no_worse_than_mean(table: ScoreTable):
    """Fitted on one half of the problems, measured on the other: with all verifiers, and with three to ten of them."""
    for seed in range(16):
        rng = np.random.default_rng(seed)
        order, count = rng.permutation(len(table)), int(rng.integers(3, 11))
        part = table.select(table.verifiers if seed < 4 else rng.permutation(table.verifiers)[:count].tolist())
        known, rest = part.take(order[::2]).with_labels_of([]), part.take(order[1::2])
        mean = selection_accuracy(NaiveMean().fit(known).predict_proba(rest), rest.labels)
        assert selection_accuracy(Auto().fit(known).predict_proba(rest), rest.labels) >= mean
        one_right = selection_accuracy(Auto(one_right=True).fit(known).predict_proba(rest), rest.labels)
        assert one_right >= mean + (0.02 if seed < 4 else -0.06)


@pytest.mark.full
def test_ten_labels_give_calibrated_aggregator_probabilities(table: ScoreTable):
    selected, errors = [], []
    for seed in range(10):
        order = np.random.default_rng(seed).permutation(len(table))
        rest = table.take(order[10:])
        p = Auto().fit(table.with_labels_of(order[:10])).predict_proba(rest)
        selected.append(selection_accuracy(p, rest.labels))
        errors.append(ece(p, rest.labels))
    assert np.mean(selected) >= 0.4
    assert np.mean(errors) <= 0.05


def test_one_right_prior_selects_better_responses_than_ten_labels(table: ScoreTable):
    hidden = table.with_labels_of([])
    p = Auto(one_right=True).fit(hidden).predict_proba(hidden)
    assert selection_accuracy(p, table.labels) > 0.45
    assert ece(p, table.labels) < 0.03
