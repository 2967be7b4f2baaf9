"""Figures and the page of a fit."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from forge_weaver import Auto, RankMean, ScoreTable, plots
from forge_weaver.report import write_report
from forge_weaver.synthetic import scenario

pytestmark = pytest.mark.costly


def test_a_page_stands_alone_with_its_warnings_in_front(tmp_path: Path):
    made = scenario("correlated", 0, problems=60, responses=12, verifiers=10).table
    odd = ScoreTable(made.scores, ("<b>odd</b>", *made.verifiers[1:]), labels=made.labels)
    with pytest.warns(UserWarning, match="err together"):
        fitted = Auto().fit(odd.with_labels_of([]))
    write_report(tmp_path / "page.html", fitted, odd)
    page = (tmp_path / "page.html").read_text()
    assert page.index("err together") < page.index("<img")
    assert page.count("data:image/png;base64,") == 4
    assert "http" not in re.sub('data:[^"]*', "", page)
    assert "<b>odd</b>" not in page
    assert "area under the ROC curve" in page
    write_report(tmp_path / "blind.html", fitted, odd.with_labels_of([]))
    assert "No evaluation: it needs labels that the fit has not seen" in (tmp_path / "blind.html").read_text()


def test_a_page_about_next_to_nothing(tmp_path: Path):
    """Two labelled problems, of which one has no probability; and names that matplotlib would read as mathematics."""
    made = scenario("independent", 0, problems=20, responses=4, verifiers=4).table
    scores = made.scores.copy()
    scores[1] = np.nan
    odd = ScoreTable(scores, ("a$b", "cost_$\\x$", "$", "d"), labels=made.labels)
    fitted = RankMean().fit(odd)
    matrix = np.eye(4).tolist()
    fitted.report = dataclasses.replace(fitted.report, correlation=matrix, correlated=list(odd.verifiers))
    write_report(tmp_path / "page.html", fitted, odd.with_labels_of([0, 1]))
    assert "Against 2 labelled problems" in (tmp_path / "page.html").read_text()


def test_figures_are_pictures():
    rng = np.random.default_rng(0)
    found = plots.drift({"online": rng.random(5), "static": rng.random(5)}, "Brier", alarms=[3])
    assert found.startswith(b"\x89PNG")
    made = scenario("independent", 0, problems=20, responses=4, verifiers=4).table
    with pytest.raises(ValueError, match="RankMean computed no residual correlations"):
        plots.correlation(RankMean().fit(made).report)
