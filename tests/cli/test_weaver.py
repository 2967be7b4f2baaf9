"""The command line on tables of scores, and what it says of those that it cannot use."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from forge.cli import main as forge
from forge.verifiers.weaver import ScoreTable
from forge.verifiers.weaver.synthetic import scenario


@pytest.fixture
def table() -> ScoreTable:
    return scenario("independent", 0, problems=20, responses=4, verifiers=4).table


def test_what_predict_has_added_is_not_taken_for_a_verifier(tmp_path, table):
    scores, fitted, predicted = (str(tmp_path / name) for name in ("scores.npz", "fitted.npz", "predicted.npz"))
    table.save(scores)
    forge(["weaver", "fit", scores, "--method", "rank_mean", "--out", fitted])
    forge(["weaver", "predict", scores, "--aggregator", fitted, "--out", predicted])
    assert ScoreTable.load(predicted).verifiers == (*table.verifiers, "weaver")
    for step in (["fit", predicted], ["predict", predicted, "--aggregator", fitted]):
        with pytest.raises(SystemExit, match="has a column weaver, which predict adds: give the scores without it"):
            forge(["weaver", *step, "--out", str(tmp_path / "again.npz")])


def test_a_report_on_answers_alone(tmp_path, table):
    """Verifiers that say nothing cannot be compared with."""
    answers = [["a" if label else "b" for label in labels] for labels in table.labels]
    silent = dataclasses.replace(table, scores=np.ones_like(table.scores), answers=answers)
    scores, report = tmp_path / "scores.npz", tmp_path / "page.html"
    silent.save(scores)
    forge(["weaver", "fit", str(scores), "--method", "majority", "--report", str(report)])
    assert "Best of k" in report.read_text()


def test_labels_that_are_not_there(tmp_path, table):
    scores = tmp_path / "scores.npz"
    table.with_labels_of(range(5, 20)).save(scores)
    with pytest.raises(SystemExit, match="labelled is 5, and there are no labels of these problems"):
        forge(["weaver", "fit", str(scores), "--labelled", "5", "--out", str(tmp_path / "fitted.npz")])
