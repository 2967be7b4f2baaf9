"""The command line on tables of scores, and what it says of those that it cannot use."""

from pathlib import Path

import numpy as np
import pytest

from forge.cli import main as forge
from forge_weaver import ScoreTable

from .synthetic import scenario


@pytest.fixture
def table() -> ScoreTable:
    return scenario("independent", 0, problems=20, responses=4, verifiers=4).table


def test_weaver_fit_of_unlabelled_problems_raises(tmp_path, table):
    scores = tmp_path / "scores.npz"
    table.with_labels_of(range(5, 20)).save(scores)
    with pytest.raises(SystemExit, match="labelled is 5, but these problems have no labels"):
        forge(["weaver", "fit", str(scores), "--labelled", "5", "--out", str(tmp_path / "fitted.npz")])


def test_invalid_weaver_output_and_verifier_names_raise_before_scoring(tmp_path, monkeypatch):
    (tmp_path / "responses.jsonl").write_text('{"prompt": "p", "responses": ["a"]}\n')
    monkeypatch.chdir(tmp_path)
    for name, out, said in (
        ("judge", "scores.parquet", r"cannot write scores\.parquet: a score table is a \.npz file"),
        ("weaver", "scores.npz", "invalid verifier name weaver: predict adds a column of that name"),
    ):
        # A judge that cannot be reached would be scores that are missing, and a file.
        Path("verifiers.yaml").write_text(f"judges: [{{url: 'http://127.0.0.1:9', model: m, name: {name}}}]")
        with pytest.raises(SystemExit, match=said):
            forge(["weaver", "score", "responses.jsonl", "--verifiers", "verifiers.yaml", "--out", out])


@pytest.mark.parametrize("method", ["binned", "online"])
def test_overconfident_aggregator_warns_of_correlated_verifiers(tmp_path, capsys, method):
    table = scenario("independent", 0, problems=100, responses=8, verifiers=4).table
    scores = tmp_path / "scores.npz"
    for made, warned in ((table, False), (copies(table), True)):
        made.save(scores)
        forge(["weaver", "fit", str(scores), "--method", method, "--out", str(tmp_path / "fitted.npz")])
        assert ("the verifiers err together" in capsys.readouterr().out) == warned


def test_forge_weaver_fit_lists_problems_to_label(tmp_path, capsys):
    """One problem has scores far from all others, and two are labelled already."""
    scores, labels = 0.1 * np.random.default_rng(0).normal(size=(30, 4, 3)), np.full((30, 4), np.nan)
    scores[7] *= 50
    labels[:2] = 0
    prompts = [f"sum of\n{i}?" for i in range(30)]
    ScoreTable(scores, tuple("abc"), labels=labels, prompts=prompts).save(tmp_path / "scores.npz")
    forge(["weaver", "fit", str(tmp_path / "scores.npz"), "--labelled", "2", "--out", str(tmp_path / "fitted.npz")])
    asked = [line for line in capsys.readouterr().out.splitlines() if line.startswith("label first: ")]
    assert asked[0] == "label first: problem 7: sum of 7?"
    assert len({*asked, "label first: problem 0: sum of 0?", "label first: problem 1: sum of 1?"}) == 12


def copies(table: ScoreTable) -> ScoreTable:
    return table.with_verifier("copy", table.scores[:, :, 0]).with_verifier("again", table.scores[:, :, 0])
