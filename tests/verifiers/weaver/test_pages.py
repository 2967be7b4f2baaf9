"""Figures and the page of a fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forge.verifiers.weaver import Auto, RankMean, ScoreTable, plots
from forge.verifiers.weaver.report import write_report
from forge.verifiers.weaver.synthetic import scenario


def test_a_page_stands_alone_with_its_warnings_in_front(tmp_path: Path):
    made = scenario("correlated", 0, problems=60, responses=12, verifiers=10).table
    odd = ScoreTable(made.scores, ("<b>odd</b>", *made.verifiers[1:]), labels=made.labels)
    with pytest.warns(UserWarning, match="err together"):
        fitted = Auto().fit(odd.with_labels_of([]))
    write_report(tmp_path / "page.html", fitted, odd)
    page = (tmp_path / "page.html").read_text()
    assert page.index("err together") < page.index("<img")
    assert page.count("data:image/png;base64,") == 4
    assert "http" not in page
    assert "<b>odd</b>" not in page
    assert "area under the ROC curve" in page
    write_report(tmp_path / "blind.html", fitted, odd.with_labels_of([]))
    assert "Without labels nothing can be said" in (tmp_path / "blind.html").read_text()


def test_figures_are_pictures():
    rng = np.random.default_rng(0)
    found = plots.drift({"online": rng.random(5), "static": rng.random(5)}, "Brier", alarms=[3])
    assert found.startswith(b"\x89PNG")
    made = scenario("independent", 0, problems=20, responses=4, verifiers=4).table
    with pytest.raises(ValueError, match="RankMean computed no residual correlations"):
        plots.correlation(RankMean().fit(made).report)
