"""Weights by agreement on the best response, against a plain computation and on verifiers whose worth is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from forge_weaver import NaiveMean, RankMean, ScoreTable, TopAgreement
from forge_weaver.agreement import problem_shares, top_agreement
from forge_weaver.selection import selection_accuracy


def plain_shares(scores: np.ndarray, sharpness: float) -> np.ndarray:
    """[responses] shares of one verifier in one problem, response by response."""
    shares = np.ones(len(scores))
    scored = [row for row in range(len(scores)) if not np.isnan(scores[row])]
    weights = {}
    for row in scored:
        below = sum(scores[other] < scores[row] for other in scored)
        equal = sum(scores[other] == scores[row] for other in scored)
        rank = below + (equal + 1) / 2
        weights[row] = np.exp(sharpness * norm.ppf((rank - 0.5) / len(scored)))
    for row in scored:
        shares[row] = weights[row] / sum(weights.values()) * len(scored)
    return shares


def test_shares_and_agreement_are_those_of_a_plain_computation():
    rng = np.random.default_rng(0)
    problem = np.repeat([0, 1, 3], [4, 1, 6])
    x = rng.integers(0, 4, (len(problem), 3)).astype(float)  # with ties
    x[rng.random(x.shape) < 0.25] = np.nan
    x[problem == 3, 2] = np.nan
    expected = np.ones(x.shape)
    agreement = np.zeros((3, 3))
    for number in (0, 1, 3):
        rows = problem == number
        for verifier in range(3):
            expected[rows, verifier] = plain_shares(x[rows, verifier], 2.0)
        q = expected[rows] / rows.sum()
        agreement += (q[:, :, None] * q[:, None, :]).sum(0) - 1 / rows.sum() * (q.sum(0)[:, None] * q.sum(0)[None])
    shares = problem_shares(x, problem, 2.0)
    assert np.allclose(shares, expected)
    # Shares of a problem sum to its number of responses, so that the products of their sums are 1.
    assert np.allclose(np.add.reduceat(shares, [0, 4, 5]), np.array([4, 1, 6])[:, None])
    assert np.allclose(top_agreement(shares, problem), agreement / 3)


def panel(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Three good verifiers, twelve whose errors on bad responses are shared, in one family; [300, 8] truth."""
    rng = np.random.default_rng(seed)
    truth = np.zeros((300, 8))
    truth[np.arange(300), rng.integers(8, size=300)] = 1
    style = rng.normal(size=(300, 8))
    good = [1.5 * truth + rng.normal(size=truth.shape) for _ in range(3)]
    styled = [0.2 * truth + 1.5 * style + rng.normal(size=truth.shape) for _ in range(12)]
    return np.stack([*good, *styled], axis=2), truth


@pytest.mark.parametrize("seed", range(5))
def test_a_family_that_agrees_with_itself_gains_no_weight(seed: int):
    scores, truth = panel(seed)
    names = tuple(f"v{number}" for number in range(15))
    families = ("a", "b", "c", *("styled",) * 12)
    table = ScoreTable(scores, names, families=families)
    fitted = TopAgreement(1 / 8).fit(table)
    weights = [fitted.report.verifiers[name]["weight"] for name in names]
    assert sum(weights[:3]) > 0.9
    accuracy = selection_accuracy(fitted.predict_proba(table), truth)
    assert accuracy > selection_accuracy(RankMean(1 / 8).fit(table).predict_proba(table), truth) + 0.2
    assert accuracy > selection_accuracy(NaiveMean().fit(table).predict_proba(table), truth) + 0.2
    # Without families the styled verifiers are the majority, and pass for right.
    alone = TopAgreement(1 / 8).fit(ScoreTable(scores, names)).predict_proba(table)
    assert selection_accuracy(alone, truth) < accuracy
