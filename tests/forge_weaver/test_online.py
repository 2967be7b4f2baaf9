"""A policy that gets better while verifiers are gamed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from benchmarks.weaver import drift
from forge_weaver import BinnedDawidSkene, Online, ScoreTable, load
from forge_weaver.calibration import brier, ece

pytestmark = pytest.mark.costly


def truth(tables: list[ScoreTable]) -> np.ndarray:
    return np.concatenate([table.labels for table in tables if table.labels is not None])


def test_gamed_verifiers_raise_alarms_and_cost_little():
    first, *rest = drift(seed=1)
    online, static = Online().fit(first), BinnedDawidSkene().fit(first)
    with pytest.warns(UserWarning, match="a verifier may be gamed: model_.*; it is muted"):
        followed = np.concatenate([online.partial_fit(table).predict_proba(table) for table in rest])
    stayed = np.concatenate([static.predict_proba(table) for table in rest])
    gamed = {alarm.split(":")[0] for alarm in online.report.alarms}
    assert gamed == set(first.verifiers[:3])
    assert brier(followed, truth(rest)) < brier(stayed, truth(rest)) - 0.02
    assert ece(followed, truth(rest)) < ece(stayed, truth(rest)) - 0.02


@pytest.mark.filterwarnings("error::UserWarning")
def test_honest_verifiers_raise_none():
    first, *rest = drift(seed=0, hacked=0)
    online, static = Online().fit(first), BinnedDawidSkene().fit(first)
    followed = np.concatenate([online.partial_fit(table).predict_proba(table) for table in rest])
    assert online.report.alarms == []
    stayed = np.concatenate([static.predict_proba(table) for table in rest])
    assert brier(followed, truth(rest)) < brier(stayed, truth(rest))
    assert online.report.class_balance == pytest.approx(np.mean(truth(rest[-1:])), abs=0.1)


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(
    ("balance", "verifiers", "size", "batches"),
    [((0.2, 0.7), 12, 4, 12), ((0.3, 0.97), 12, 32, 40), ((0.5, 0.03), 12, 32, 40), ((0.2, 0.7), 3, 32, 40)],
    ids=["small batches", "ever better", "ever worse", "three verifiers"],
)
def test_honest_verifiers_raise_none_however_they_come(
    balance: tuple[float, float], verifiers: int, size: int, batches: int
):
    first, *rest = drift(batches=batches, seed=1, hacked=0, balance=balance, verifiers=verifiers)
    online = Online().fit(first)
    for table in rest:
        for start in range(0, len(table), size):
            online.partial_fit(table.take(range(start, start + size)))
    assert online.report.alarms == []


@pytest.mark.filterwarnings("error::UserWarning")
def test_others_that_are_down_are_no_reason_for_an_alarm():
    first, *rest = drift(batches=20, hacked=0, seed=0, balance=(0.3, 0.3))
    online = Online().fit(first)
    for table in rest:
        scores = table.scores.copy()
        scores[..., 1:] = np.nan
        online.partial_fit(dataclasses.replace(table, scores=scores))
    assert online.watch[0].max() == 0


@pytest.mark.filterwarnings("ignore:a verifier may be gamed:UserWarning")
def test_three_verifiers_are_listened_to_whatever_they_do():
    first, *rest = drift(seed=0, hacked=1, verifiers=4)
    online = Online().fit(first)
    for table in rest:
        online.partial_fit(table)
    assert (~online.muted).sum() == 3
    fewer = first.select(first.verifiers[:3])
    online = Online().fit(fewer)
    for table in rest:
        online.partial_fit(table.select(fewer.verifiers))
    assert not online.muted.any()
    assert all("not muted" in alarm for alarm in online.report.alarms)
    assert online.report.alarms


def test_a_rate_that_died_out_comes_back():
    def batch(rate: float, problems: int, seed: int) -> ScoreTable:
        rng = np.random.default_rng(seed)
        right = (rng.random((problems, 8)) < rate).astype(float)
        return ScoreTable(1.6 * right[..., None] + rng.normal(size=(problems, 8, 6)), tuple("abcdef"), labels=right)

    online = Online(mute=False).fit(batch(0.4, 120, 0))
    for seed in range(25):
        online.partial_fit(batch(0.1, 16, 10 + seed))
    for seed in range(3):
        better = batch(0.85, 16, 100 + seed)
        p = online.partial_fit(better).predict_proba(better)
    assert p.mean() == pytest.approx(np.mean(truth([better])), abs=0.06)


@pytest.mark.filterwarnings("ignore:a verifier may be gamed:UserWarning")
def test_it_goes_on_from_a_file(tmp_path: Path):
    first, *rest = drift(batches=30, seed=2)
    online = Online().fit(first)
    for table in rest[:20]:
        online.partial_fit(table)
    online.save(tmp_path / "online.npz")
    again = load(tmp_path / "online.npz")
    for table in rest[20:]:
        np.testing.assert_array_equal(
            again.partial_fit(table).predict_proba(table), online.partial_fit(table).predict_proba(table)
        )
    assert again.report.alarms == online.report.alarms != []


def test_further_batches_sharpen_a_static_fit():
    first, *_ = drift(batches=1, seed=4, hacked=0, first=400)
    whole = BinnedDawidSkene().fit(first)
    grown = BinnedDawidSkene().fit(first.take(range(100)))
    few = grown.predict_proba(first)
    for start in (100, 200, 300):
        grown.partial_fit(first.take(range(start, start + 100)))
    assert grown.report.problems == 400
    assert np.abs(grown.predict_proba(first) - whole.predict_proba(first)).mean() < 0.05
    assert brier(grown.predict_proba(first), first.labels) < brier(few, first.labels) + 0.01
