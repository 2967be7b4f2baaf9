"""A policy that gets better while verifiers are gamed."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from benchmarks.weaver import drift
from forge_weaver import BinnedDawidSkene, Online, ScoreTable, load
from forge_weaver.calibration import brier_score, ece

pytestmark = pytest.mark.costly


def truth(tables: list[ScoreTable]) -> np.ndarray:
    return np.concatenate([table.labels for table in tables if table.labels is not None])


def test_online_ensemble_mutes_gamed_verifiers_with_alarms():
    first, *rest = drift(seed=1)
    online, static = Online().fit(first), BinnedDawidSkene().fit(first)
    with pytest.warns(UserWarning, match="a verifier may be gamed: model_.*; it is muted"):
        followed = np.concatenate([online.partial_fit(table).predict_proba(table) for table in rest])
    stayed = np.concatenate([static.predict_proba(table) for table in rest])
    assert {alarm.split(":")[0] for alarm in online.report.alarms} == set(first.verifiers[:3])
    assert brier_score(followed, truth(rest)) < brier_score(stayed, truth(rest)) - 0.02
    assert ece(followed, truth(rest)) < ece(stayed, truth(rest)) - 0.02


@pytest.mark.filterwarnings("error::UserWarning")
def test_online_ensemble_raises_no_alarm_for_honest_verifiers():
    first, *rest = drift(seed=0, hacked=0)
    online, static = Online().fit(first), BinnedDawidSkene().fit(first)
    followed = np.concatenate([online.partial_fit(table).predict_proba(table) for table in rest])
    assert online.report.alarms == []
    stayed = np.concatenate([static.predict_proba(table) for table in rest])
    assert brier_score(followed, truth(rest)) < brier_score(stayed, truth(rest))
    assert online.report.class_balance == pytest.approx(np.mean(truth(rest[-1:])), abs=0.1)


@pytest.mark.filterwarnings("error::UserWarning")
def test_online_ensemble_raises_no_alarm_for_missing_scores():
    first, *rest = drift(batches=20, hacked=0, seed=0, balance=(0.3, 0.3))
    online = Online().fit(first)
    for table in rest:
        scores = table.scores.copy()
        scores[..., 1:] = np.nan
        online.partial_fit(dataclasses.replace(table, scores=scores))
    assert online.watch[0].max() == 0


@pytest.mark.filterwarnings("ignore:a verifier may be gamed:UserWarning")
def test_online_ensemble_keeps_at_least_three_verifiers_unmuted():
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


@pytest.mark.filterwarnings("ignore:a verifier may be gamed:UserWarning")
def test_online_ensemble_fit_resumes_from_file(tmp_path: Path):
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
