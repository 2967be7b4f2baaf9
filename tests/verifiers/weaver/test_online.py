"""A policy that gets better while verifiers are gamed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forge.verifiers.weaver import BinnedDawidSkene, Online, ScoreTable, load
from forge.verifiers.weaver.calibration import brier, ece
from forge.verifiers.weaver.synthetic import drift


def truth(tables: list[ScoreTable]) -> np.ndarray:
    return np.concatenate([table.labels for table in tables if table.labels is not None])


def test_gamed_verifiers_raise_alarms_and_cost_little():
    first, *rest = drift(seed=1)
    online, static = Online().fit(first), BinnedDawidSkene().fit(first)
    with pytest.warns(UserWarning, match="a verifier may be gamed: model_"):
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
