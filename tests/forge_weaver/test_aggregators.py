"""What all aggregators have in common, and what each is for."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from forge_weaver import (
    Aggregator,
    AnchoredLogistic,
    Auto,
    BinnedDawidSkene,
    CalibratedMean,
    CorrelatedMixture,
    DawidSkene,
    NaiveMean,
    Online,
    PublishedWeaver,
    RankMean,
    ScoreTable,
    load,
)
from forge_weaver.calibration import auc, ece, log_loss
from forge_weaver.selection import selection_accuracy

from .synthetic import Truth, generate, scenario

pytestmark = pytest.mark.costly

MAKERS: list[Callable[[], Aggregator]] = [
    NaiveMean,
    RankMean,
    lambda: CalibratedMean(0.3),
    lambda: PublishedWeaver(class_balance=0.3),
    lambda: PublishedWeaver(converged=True),
    DawidSkene,
    BinnedDawidSkene,
    CorrelatedMixture,
    lambda: CorrelatedMixture(one_right=True),
    AnchoredLogistic,
    Auto,
    Online,
]
every = pytest.mark.parametrize("make", MAKERS, ids=lambda make: type(make()).__name__)
quiet = pytest.mark.filterwarnings("ignore:the verifiers err together:UserWarning")


@pytest.fixture(scope="module")
def table() -> ScoreTable:
    """40 problems of up to 8 responses by 9 verifiers, a tenth of the scores and two responses missing."""
    made = generate(40, 8, 9, missing=0.1, seed=3, areas=(0.65, 0.9)).table
    present = np.ones((40, 8), bool)
    present[5, 6:] = present[9, 3:] = False
    scores = made.scores.copy()
    scores[2, 4] = np.nan
    scores[~present] = np.nan
    assert made.answers is not None
    assert made.labels is not None
    answers = [row[:count] for row, count in zip(made.answers, present.sum(1), strict=True)]
    families = tuple(f"family {v // 2}" for v in range(9))
    return ScoreTable(
        scores,
        made.verifiers,
        labels=np.where(present, made.labels, np.nan),
        answers=answers,
        families=families,
        present=present,
    )


@quiet
@every
def test_saved_weaver_aggregator_predicts_identically(
    make: Callable[[], Aggregator], table: ScoreTable, tmp_path: Path
):
    fitted = make().fit(table)
    fitted.save(tmp_path / "fit.npz")
    again = load(tmp_path / "fit.npz")
    assert type(again) is type(fitted)
    np.testing.assert_array_equal(again.predict_proba(table), fitted.predict_proba(table))
    assert again.report.to_dict() == fitted.report.to_dict()
    json.dumps(again.report.to_dict(), allow_nan=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["fit.npz"]
    if isinstance(again, Online) and isinstance(fitted, Online):
        again.partial_fit(table.take(range(10)))
        fitted.partial_fit(table.take(range(10)))
        np.testing.assert_array_equal(again.predict_proba(table), fitted.predict_proba(table))


def test_invalid_weaver_aggregator_file_raises(table: ScoreTable, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"aggregator file .* does not exist"):
        load(tmp_path / "none.npz")
    table.save(tmp_path / "table.npz")
    (tmp_path / "text.npz").write_text("hello")
    for name in ("table.npz", "text.npz"):
        with pytest.raises(ValueError, match=f"{name} is not a saved aggregator"):
            load(tmp_path / name)
    fitted = RankMean().fit(table)
    fitted.save(tmp_path / "whole.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"cut\.npz is not a saved aggregator"):
        load(tmp_path / "cut.npz")
    with pytest.raises(ValueError, match="is not fitted: call fit"):
        RankMean().save(tmp_path / "unfitted.npz")


@quiet
@every
def test_weaver_aggregator_matches_verifiers_by_name(make: Callable[[], Aggregator], table: ScoreTable):
    fitted = make().fit(table)
    turned = table.select(table.verifiers[::-1])
    np.testing.assert_array_equal(fitted.predict_proba(turned), fitted.predict_proba(table))
    first, *rest = table.verifiers
    with pytest.raises(ValueError, match=f"lacks {first}: use table.select"):
        fitted.predict_proba(table.select(rest))
    more = dataclasses.replace(table.select([*rest, first]), verifiers=(*rest, "stranger"), families=None)
    with pytest.raises(ValueError, match=f"lacks {first} and also has stranger"):
        fitted.predict_proba(more)


UNSUPERVISED = [maker for maker in MAKERS if not isinstance(maker(), AnchoredLogistic)]


@quiet
@pytest.mark.parametrize("make", UNSUPERVISED, ids=lambda make: type(make()).__name__)
def test_unsupervised_aggregator_fit_ignores_labels(make: Callable[[], Aggregator], table: ScoreTable):
    blind = table.with_labels_of([])
    guess = dataclasses.replace(table, labels=1 - table.labels)
    if isinstance(make(), Auto):
        # Fewer than it uses.
        guess = guess.with_labels_of(range(4))
    np.testing.assert_array_equal(make().fit(guess).predict_proba(blind), make().fit(blind).predict_proba(blind))


@pytest.mark.full
@quiet
@settings(max_examples=4)
@given(st.integers(0, 10_000), st.sampled_from([0.02, 0.1, 0.3, 0.6, 0.8, 0.98]), st.booleans())
def test_unsupervised_aggregator_never_swaps_right_and_wrong(seed: int, balance: float, verdicts: bool):
    """Whatever the seed, what all verifiers call better is more probable."""
    truth = generate(40, 8, 9, balance=balance, verdicts=verdicts, seed=seed, areas=(0.6, 0.85))
    hidden = truth.table.with_labels_of([])
    for make in (DawidSkene, BinnedDawidSkene, CorrelatedMixture, Auto, PublishedWeaver):
        p = make().fit(hidden).predict_proba(hidden)
        anchor = RankMean().fit(hidden).predict_proba(hidden)
        assert np.corrcoef(p.ravel(), anchor.ravel())[0, 1] > 0, make.__name__


def rates(fitted: Aggregator, truth: Truth) -> tuple[np.ndarray, np.ndarray]:
    """Estimated and true TPR."""
    labels = truth.table.labels
    assert labels is not None
    true = np.nanmean(np.where(labels[..., None] == 1, truth.table.scores, np.nan), axis=(0, 1))
    return np.array([fitted.report.verifiers[name]["tpr"] for name in truth.table.verifiers]), true


@pytest.mark.parametrize("missing", [0.0, 0.2])
@pytest.mark.parametrize("balance", [0.3, 0.6])
def test_dawid_skene_aggregator_recovers_error_rates_without_labels(balance: float, missing: float):
    truth = generate(200, 50, 20, balance=balance, missing=missing, verdicts=True, seed=1)
    estimated, true = rates(DawidSkene().fit(truth.table.with_labels_of([])), truth)
    assert np.abs(estimated - true).mean() < 0.01


def test_aggregator_inverts_verifier_worse_than_chance():
    truth = generate(100, 20, 9, verdicts=True, seed=0, areas=(0.7, 0.85))
    scores = truth.table.scores.copy()
    scores[..., 0] = 1 - scores[..., 0]
    fitted = DawidSkene().fit(dataclasses.replace(truth.table, scores=scores).with_labels_of([]))
    found = fitted.report.verifiers[truth.table.verifiers[0]]
    assert found["tpr"] + found["tnr"] < 0.9
    assert auc(fitted.predict_proba(dataclasses.replace(truth.table, scores=scores)), truth.table.labels) > 0.9


def test_published_weaver_aggregator_requires_three_verifiers():
    made = generate(50, 10, 6, verdicts=True, seed=0).table
    scores = made.scores.copy()
    scores[..., 0] = np.random.default_rng(0).random((50, 10)) < 0.95
    one_sided = dataclasses.replace(made, scores=scores)
    with pytest.raises(ValueError, match="at least 3 verifiers"):
        PublishedWeaver(class_balance=0.3).fit(one_sided.select(made.verifiers[:2]))
    holes = np.where(np.random.default_rng(0).random(scores.shape) < 0.1, np.nan, scores)
    warned = PublishedWeaver(class_balance=0.3).fit(dataclasses.replace(made, scores=holes))
    assert "counted as rejections" in warned.report.warnings[0]


def test_ten_labels_improve_aggregator_selection():
    """Ten labelled problems of the correlated scenario beat the rank mean on the others, and are calibrated."""
    found = []
    for seed in range(3):
        made = scenario("correlated", seed, problems=150).table
        fitted = AnchoredLogistic().fit(made.with_labels_of(range(10)))
        rest = made.take(range(10, 150))
        p, rank = fitted.predict_proba(rest), RankMean().fit(rest).predict_proba(rest)
        found.append((auc(p, rest.labels) - auc(rank, rest.labels), ece(p, rest.labels)))
    gain, error = np.mean(found, axis=0)
    assert gain > 0.03
    assert error < 0.1
    with pytest.raises(ValueError, match="two labelled problems"):
        AnchoredLogistic().fit(made.with_labels_of([0]))


@pytest.mark.full
def test_auto_aggregator_chooses_method_by_labels_and_independence(table: ScoreTable):
    hard = scenario("hard", 0, problems=100).table
    labelled = Auto(agreement=1.0).fit(hard.with_labels_of(range(10)))
    assert (labelled.report.method, labelled.report.warnings) == ("Auto: AnchoredLogistic", [])
    independent = scenario("independent", 0, problems=100).table
    with pytest.warns(UserWarning, match="labels of 4 problems are too few to be used: 5 are needed"):
        found = Auto().fit(independent.with_labels_of(range(4)))
    assert found.report.method == "Auto: BinnedDawidSkene"
    assert found.report.residual_correlation is not None
    assert found.report.residual_correlation < 0.05
    rest = independent.take(range(8, 100))
    with_labels = Auto().fit(independent.with_labels_of(range(8))).predict_proba(rest)
    without = Auto().fit(independent.with_labels_of([])).predict_proba(rest)
    alone = AnchoredLogistic().fit(independent.with_labels_of(range(8))).predict_proba(rest)
    losses = [log_loss(p, rest.labels) for p in (with_labels, without, alone)]
    assert losses[0] <= min(losses) + 0.01
    assert np.array(found.report.correlation).shape == (24, 24)
    one_class = dataclasses.replace(independent, labels=np.ones((100, 32)))
    with pytest.warns(UserWarning, match="all labels are of one class"):
        assert Auto().fit(one_class).report.method == "Auto: BinnedDawidSkene"
    with pytest.raises(ValueError, match="omit class_balance"):
        Auto(one_right=True, class_balance=0.1).fit(table)


@pytest.mark.parametrize("count", [1, 2])
def test_auto_aggregator_of_one_or_two_verifiers_warns_and_uses_mean(count: int):
    made = generate(100, 16, count, areas=(0.8, 0.8), seed=0).table
    hidden = made.with_labels_of([])
    with pytest.warns(UserWarning, match="nothing can be inferred without labels.* no more than a guess"):
        fitted = Auto().fit(hidden)
    assert fitted.report.method == "Auto: CalibratedMean"
    p, mean = fitted.predict_proba(hidden), NaiveMean().fit(hidden).predict_proba(hidden)
    np.testing.assert_array_equal(np.argsort(p, axis=None), np.argsort(mean, axis=None))
    assert p.mean() == pytest.approx(0.5)


@quiet
def test_auto_aggregator_uses_mixture_only_with_separable_classes():
    """Shared noise looks like classes to a mixture of Gaussians, and so do problems that shift all scores."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(60, 8, 5)) + rng.normal(size=(60, 8, 1))
    doubtful = [noise, noise + rng.normal(size=(60, 1, 1)), noise.reshape(480, 1, 5)]
    for table in [ScoreTable(scores, tuple("abcde")) for scores in doubtful]:
        fitted = Auto().fit(table)
        assert fitted.report.method == "Auto: CalibratedMean"
        p, mean = fitted.predict_proba(table), NaiveMean().fit(table).predict_proba(table)
        np.testing.assert_array_equal(p.argmax(1), mean.argmax(1))
    correlated = scenario("correlated", 0, problems=60).table.with_labels_of([])
    assert Auto().fit(correlated).report.method == "Auto: CorrelatedMixture"


@pytest.mark.parametrize("count", [1, 2])
def test_one_right_prior_is_calibrated_with_one_or_two_verifiers(count: int):
    rng = np.random.default_rng(0)
    right = np.eye(6)[rng.integers(0, 6, 200)]
    made = ScoreTable(2 * right[..., None] + rng.normal(size=(200, 6, count)), tuple("ab"[:count]), labels=right)
    p = Auto(one_right=True).fit(made.with_labels_of([])).predict_proba(made)
    np.testing.assert_allclose(p.sum(1), 1)
    assert selection_accuracy(p, right) > 0.7
    assert ece(p, right) < 0.06


def test_one_right_prior_improves_aggregator_selection():
    """Scores that hard problems move altogether: what to go by is that one of six is right."""
    rng = np.random.default_rng(0)
    right = np.eye(6)[rng.integers(0, 6, 300)]
    distance, sees = np.array([0.5, 0.5, 2.0, 2.0, 0.5, 0.5]), np.array([0, 0, 1, 1, 0, 0])
    shared = rng.normal(size=(300, 6, 1)) * (1 - sees)
    scores = (
        right[..., None] * distance + 0.7 * rng.normal(size=(300, 1, 6)) + shared + 0.5 * rng.normal(size=(300, 6, 6))
    )
    made = ScoreTable(scores, tuple("abcdef"), labels=right)
    hidden = made.with_labels_of([])
    p = CorrelatedMixture(one_right=True).fit(hidden).predict_proba(hidden)
    np.testing.assert_allclose(p.sum(1), 1)
    rank = RankMean(1 / 6).fit(hidden).predict_proba(hidden)
    assert selection_accuracy(p, right) > selection_accuracy(rank, right) + 0.2
    assert ece(p, right) < 0.05


def only(table: ScoreTable, mask: np.ndarray) -> ScoreTable:
    """With scores of some responses only."""
    return dataclasses.replace(table, scores=np.where(mask[..., None], table.scores, np.nan))


@quiet
@every
def test_aggregators_ignore_unscored_responses(make: Callable[[], Aggregator], table: ScoreTable):
    if isinstance(make(), Auto):
        return
    plain = dataclasses.replace(table.take(range(30)), families=None)
    assert plain.labels is not None
    holes = ScoreTable(
        np.concatenate([plain.scores, only(plain, np.zeros(plain.present.shape, bool)).scores]),
        plain.verifiers,
        labels=np.concatenate([plain.labels, np.where(plain.present, 1.0, np.nan)]),
        present=np.concatenate([plain.present] * 2),
    )
    fitted = make().fit(holes)
    if getattr(make(), "one_right", False):
        assert np.isfinite(fitted.predict_proba(plain)[plain.present & ~np.isnan(plain.scores).all(2)]).all()
    else:
        np.testing.assert_allclose(fitted.predict_proba(plain), make().fit(plain).predict_proba(plain), atol=1e-12)


def test_published_weaver_posterior_matches_paper_formula():
    made = generate(60, 10, 6, verdicts=True, seed=0).table.with_labels_of([])
    fitted = PublishedWeaver(class_balance=0.3).fit(made)
    said, mu = made.flat, np.clip(fitted.mu, 0.01, 0.99)
    assert np.abs(mu.reshape(6, 2, 2).sum(1) - 1).max() > 0.01
    expected = []
    for row in said:
        likelihood = [1 - 0.3, 0.3]
        for y in (0, 1):
            for i, verdict in enumerate(row):
                likelihood[y] *= mu[2 * i + int(verdict), y]
        expected.append(likelihood[1] / sum(likelihood))
    np.testing.assert_allclose(fitted.predict_proba(made).ravel(), expected, atol=1e-12)


def test_invalid_aggregator_settings_raise(table: ScoreTable):
    for make in (RankMean, BinnedDawidSkene, CorrelatedMixture, PublishedWeaver, Auto):
        for balance in (0.0, 1.0, -1.0, float("nan")):
            with pytest.raises(ValueError, match=r"class_balance \(the share"):
                make(class_balance=balance).fit(table)
    with pytest.raises(TypeError, match="bins"):
        DawidSkene(bins=8)  # type: ignore[call-arg]
    for balance in (0.002, 0.998):
        assert BinnedDawidSkene(class_balance=balance).fit(table).report.class_balance == pytest.approx(balance)
