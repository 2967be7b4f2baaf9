"""A policy that gets better while the aggregator follows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.weaver import drift
from forge_weaver import BinnedDawidSkene, Online, load
from forge_weaver.calibration import brier_score

pytestmark = pytest.mark.costly


def test_online_fit_follows_improving_policy():
    first, *rest = drift(seed=0, hacked=0)
    online, static = Online().fit(first), BinnedDawidSkene().fit(first)
    followed = np.concatenate([online.partial_fit(table).predict_proba(table) for table in rest])
    stayed = np.concatenate([static.predict_proba(table) for table in rest])
    truth = np.concatenate([table.labels for table in rest if table.labels is not None])
    assert brier_score(followed, truth) < brier_score(stayed, truth)
    assert online.report.class_balance == pytest.approx(truth[-32:].mean(), abs=0.1)


def test_online_fit_resumes_from_file(tmp_path: Path):
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
