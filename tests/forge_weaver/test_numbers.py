"""The numerics against enumeration, closed forms and finite differences."""

from itertools import product
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.stats import multivariate_normal

from forge_weaver.calibration import Recalibration, auc, brier_score, ece, log_loss
from forge_weaver.correlated import RIDGE, classless_likelihood
from forge_weaver.em import Prior
from forge_weaver.normalise import (
    NormalScores,
    impute_scores,
)
from forge_weaver.published import minimise_loss, published_loss
from forge_weaver.selection import selection_accuracy

NAN = float("nan")


def test_normal_scores_are_normal_quantiles_of_mid_ranks():
    x = np.array([[3.0], [1.0], [1.0], [NAN], [7.0]])
    scores = NormalScores.fit(x)
    quantile = NormalDist().inv_cdf
    expected = [quantile(5 / 8), quantile(1 / 4), quantile(1 / 4), NAN, quantile(7 / 8)]
    np.testing.assert_allclose(scores(x)[:, 0], expected, atol=1e-12)
    # Frozen: between known values interpolated, beyond them the outermost.
    np.testing.assert_allclose(scores(np.array([[2.0], [-9.0], [99.0]]))[:, 0], [
        (quantile(1 / 4) + quantile(5 / 8)) / 2, quantile(1 / 4), quantile(7 / 8),
    ])  # fmt: skip


def test_missing_verifier_scores_are_imputed_by_regression():
    rng = np.random.default_rng(0)
    covariance = np.array([[1.0, 0.8, 0.5], [0.8, 1.0, 0.6], [0.5, 0.6, 1.0]])
    full = rng.multivariate_normal(np.zeros(3), covariance, 4000)
    holes = full.copy()
    holes[:, 2][rng.random(4000) < 0.3] = NAN
    gone = np.isnan(holes[:, 2])
    found, precision = impute_scores(holes)
    expected = full[gone, :2] @ np.linalg.solve(covariance[:2, :2], covariance[:2, 2])
    assert np.corrcoef(found[gone, 2], expected)[0, 1] > 0.99
    np.testing.assert_array_equal(found[~gone], full[~gone])
    again, _ = impute_scores(holes[:5], precision)
    assert not np.isnan(again).any()


@given(st.integers(0, 10_000))
def test_difficulty_prior_posterior_matches_enumeration(seed: int):
    """All truths of a problem's responses are gone through, for each rate."""
    rng = np.random.default_rng(seed)
    prior = Prior(np.array([0.1, 0.5, 0.8]), rng.dirichlet(np.ones(3)))
    evidence, problem = rng.normal(0, 2, 5), np.array([0, 0, 0, 1, 1])
    found = prior.posterior(evidence, problem)
    for i in (0, 1):
        own = evidence[problem == i]
        total, right = 0.0, np.zeros(len(own))
        for truth in product((0, 1), repeat=len(own)):
            y = np.array(truth)
            for rate, weight in zip(prior.rates, prior.weights, strict=True):
                chance = weight * np.prod(np.where(y == 1, rate, 1 - rate)) * np.exp(own @ y)
                total += chance
                right += chance * y
        np.testing.assert_allclose(found[problem == i], right / total, atol=1e-10)
        assert (np.argsort(found[problem == i]) == np.argsort(own)).all()


def test_difficulty_prior_likelihood_matches_enumeration():
    prior, evidence = Prior(np.array([0.2, 0.7]), np.array([0.4, 0.6])), np.array([1.0, -2.0, 0.5])
    expected = sum(
        weight * np.prod(np.where(y, rate, 1 - rate)) * np.exp(evidence @ y)
        for y in map(np.array, product((0, 1), repeat=3))
        for rate, weight in zip(prior.rates, prior.weights, strict=True)
    )
    assert prior.log_likelihood(evidence, np.zeros(3, int)) == pytest.approx(np.log(expected))


@pytest.mark.parametrize("is_shifted", [False, True])
def test_single_class_likelihood_matches_multivariate_normal(is_shifted: bool):
    """Of all scores of a problem at once, under the moments of balanced problems."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 4, 2)) @ rng.normal(size=(2, 2)) + rng.normal(size=(20, 1, 2))
    within = np.cov(x.reshape(80, 2).T)
    between = np.zeros((2, 2))
    if is_shifted:
        within = sum(np.cov(problem.T) for problem in x) / 20
        between = np.cov(x.mean(1).T) - (within + RIDGE * np.diag(np.diag(within))) / 4
    within = within + RIDGE * np.diag(np.diag(within))
    y, sizes = rng.normal(size=(5, 2)), (3, 2)
    found = classless_likelihood(
        x.reshape(80, 2), np.repeat(np.arange(20), 4), y, np.repeat([0, 1], sizes), is_shifted=is_shifted
    )
    for part, size, likelihood in zip((y[:3], y[3:]), sizes, found, strict=True):
        covariance = np.kron(np.eye(size), within) + np.kron(np.ones((size, size)), between)
        expected = multivariate_normal(np.tile(x.mean((0, 1)), size), covariance).logpdf(part.ravel())
        assert likelihood == pytest.approx(expected + size * np.log(2 * np.pi))


def test_fitted_prior_recovers_problem_difficulty_rates():
    rng = np.random.default_rng(1)
    rate = np.where(rng.random(300) < 0.5, 0.1, 0.8)
    right = rng.random((300, 20)) < rate[:, None]
    evidence = (2 * right - 1 + rng.normal(size=right.shape)).ravel() * 2
    problem, prior = np.repeat(np.arange(300), 20), Prior.start(0.5)
    for _ in range(60):
        _, prior = prior.step(evidence, problem, None)
    assert prior.balance == pytest.approx(right.mean(), abs=0.01)
    assert prior.weights[(prior.rates > 0.15) & (prior.rates < 0.65)].sum() < 0.1


def moments(tpr: np.ndarray, tnr: np.ndarray, pi: float) -> np.ndarray:
    """Exact second moments of conditionally independent verdicts, rows (0 no, 0 yes, 1 no, ...)."""
    mu = np.empty((2 * len(tpr), 2))
    mu[0::2, 1], mu[1::2, 1], mu[0::2, 0], mu[1::2, 0] = 1 - tpr, tpr, tnr, 1 - tnr
    o = mu @ np.diag([1 - pi, pi]) @ mu.T
    for i in range(len(tpr)):
        block = slice(2 * i, 2 * i + 2)
        o[block, block] = np.diag(mu[block] @ [1 - pi, pi])
    return o


def test_published_weaver_loss_is_minimal_at_true_verifier_rates():
    rng = np.random.default_rng(0)
    tpr, tnr, pi = rng.uniform(0.6, 0.9, 6), rng.uniform(0.6, 0.9, 6), 0.3
    o = moments(tpr, tnr, pi)
    mu = minimise_loss(o, pi, converged=True, seed=0)
    np.testing.assert_allclose(mu[1::2, 1], tpr, atol=1e-3)
    np.testing.assert_allclose(mu[0::2, 0], tnr, atol=1e-3)
    assert published_loss(mu, o, pi) < 1e-8


def test_published_weaver_update_follows_numeric_gradient():
    """1,000 steps of 1e-5 with momentum .9, by finite differences of the objective."""
    rng = np.random.default_rng(0)
    o, pi = moments(rng.uniform(0.6, 0.9, 3), rng.uniform(0.6, 0.9, 3), 0.4), 0.4
    mu = np.zeros((6, 2))
    for y, share in ((0, 0.6), (1, 0.4)):
        mu[y::2, y] = np.clip(np.diag(o)[y::2] * 0.7 / share, 0, 1)
    mu *= np.random.RandomState(5).random_sample()
    velocity, h = np.zeros_like(mu), 1e-6
    for _ in range(1000):
        gradient = np.zeros_like(mu)
        for at in np.ndindex(*mu.shape):
            up, down = mu.copy(), mu.copy()
            up[at], down[at] = up[at] + h, down[at] - h
            gradient[at] = (published_loss(up, o, pi) - published_loss(down, o, pi)) / (2 * h)
        velocity = 0.9 * velocity + gradient
        mu = np.clip(mu - 1e-5 * velocity, 0, 1)
    np.testing.assert_allclose(minimise_loss(o, pi, converged=False, seed=5), mu, atol=1e-6)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.2, 0.5, 0.9]), st.booleans()), min_size=2, max_size=12))
def test_auc_metric_equals_share_of_correctly_ordered_pairs(pairs: list[tuple[float, bool]]):
    p, y = np.array([a for a, _ in pairs]), np.array([float(b) for _, b in pairs])
    wins = [(a > b) + (a == b) / 2 for a in p[y == 1] for b in p[y == 0]]
    np.testing.assert_allclose(auc(p, y), np.mean(wins) if wins else NAN)


def test_brier_ece_and_log_loss_match_hand_computation():
    p, y = np.array([[0.1, 0.1, 0.9], [0.9, NAN, 0.5]]), np.array([[0.0, 1.0, 1.0], [1.0, 1.0, NAN]])
    assert brier_score(p, y) == pytest.approx((0.01 + 0.81 + 0.01 + 0.01) / 4)
    assert ece(p, y) == pytest.approx(0.5 * 0.4 + 0.5 * 0.1)
    assert log_loss(p, y) == pytest.approx(-(3 * np.log(0.9) + np.log(0.1)) / 4)
    assert ece(np.array([1.0]), np.array([1.0])) == 0
    with pytest.raises(ValueError, match="no response has both"):
        ece(np.array([NAN]), np.array([1.0]))


def test_probability_recalibration_recovers_slope_and_intercept():
    rng = np.random.default_rng(0)
    true = rng.beta(1, 2, 40_000)
    y = (rng.random(len(true)) < true).astype(float)
    logits = np.log(true / (1 - true))
    bent = 1 / (1 + np.exp(-(3 * logits + 1)))
    fitted = Recalibration.fit(bent, y)
    assert fitted.slope == pytest.approx(1 / 3, abs=0.02)
    assert fitted.intercept == pytest.approx(-1 / 3, abs=0.03)
    assert ece(fitted(bent), y) < 0.01 < 0.1 < ece(bent, y)
    separable = Recalibration.fit(np.array([0.2, 0.8]), np.array([0.0, 1.0]))
    assert np.isfinite([separable.slope, separable.intercept]).all()
    with pytest.raises(ValueError, match="both classes"):
        Recalibration.fit(np.array([0.2]), np.array([0.0]))


def test_best_of_n_selection_accuracy_averages_ties():
    p = np.array([[0.2, 0.9, 0.9], [NAN, NAN, NAN], [NAN, 0.1, NAN]])
    y = np.array([[0, 1, 0], [1, 0, 0], [0, 1, 0]], dtype=float)
    assert selection_accuracy(p, y) == pytest.approx((0.5 + 1 / 3 + 1) / 3)
    assert selection_accuracy(p, np.where([[True], [False], [False]], y, NAN)) == 0.5
