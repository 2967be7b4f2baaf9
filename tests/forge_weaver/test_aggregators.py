"""What all aggregators have in common, and what each is for."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_weaver import (
    Aggregator,
    AnchoredLogistic,
    Auto,
    BinnedDawidSkene,
    CorrelatedMixture,
    DawidSkene,
    NaiveMean,
    Online,
    PublishedWeaver,
    RankMean,
    ScoreTable,
    TopAgreement,
    load,
)
from forge_weaver.calibration import auc, ece, log_loss
from forge_weaver.means import fitted_slope
from forge_weaver.selection import selection_accuracy

from .synthetic import Truth, generate, scenario

pytestmark = pytest.mark.costly

MAKERS: list[Callable[[], Aggregator]] = [
    NaiveMean,
    RankMean,
    lambda: RankMean(0.3, by_family=True),
    lambda: PublishedWeaver(class_balance=0.3),
    lambda: PublishedWeaver(converged=True),
    DawidSkene,
    BinnedDawidSkene,
    CorrelatedMixture,
    lambda: CorrelatedMixture(one_right=True),
    AnchoredLogistic,
    Auto,
    Online,
    TopAgreement,
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
def test_probabilities_and_what_has_none(make: Callable[[], Aggregator], table: ScoreTable):
    p = make().fit(table).predict_proba(table)
    assert p.shape == table.present.shape
    unscored = ~table.present
    unscored[2, 4] = True
    np.testing.assert_array_equal(np.isnan(p), unscored)
    assert (p[~unscored] >= 0).all()
    assert (p[~unscored] <= 1).all()
    assert auc(p, table.labels) > 0.55


@quiet
@every
def test_a_file_holds_all_there_is(make: Callable[[], Aggregator], table: ScoreTable, tmp_path: Path):
    fitted = make().fit(table)
    fitted.save(tmp_path / "fit.npz")
    again = load(tmp_path / "fit.npz")
    assert type(again) is type(fitted)
    np.testing.assert_array_equal(again.predict_proba(table), fitted.predict_proba(table))
    assert again.report.to_dict() == fitted.report.to_dict()
    json.dumps(again.report.to_dict(), allow_nan=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["fit.npz"]
    again.partial_fit(table.take(range(10)))
    fitted.partial_fit(table.take(range(10)))
    np.testing.assert_array_equal(again.predict_proba(table), fitted.predict_proba(table))
    assert fitted.report.problems == 50


def test_files_that_are_no_aggregators(table: ScoreTable, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no such aggregator"):
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
    with pytest.raises(ValueError, match="has not been fitted"):
        RankMean().save(tmp_path / "unfitted.npz")


@quiet
@every
def test_verifiers_are_found_by_name(make: Callable[[], Aggregator], table: ScoreTable):
    fitted = make().fit(table)
    turned = table.select(table.verifiers[::-1])
    np.testing.assert_array_equal(fitted.predict_proba(turned), fitted.predict_proba(table))
    first, *rest = table.verifiers
    with pytest.raises(ValueError, match=f"lacks {first}: use table.select"):
        fitted.predict_proba(table.select(rest))
    more = dataclasses.replace(table.select([*rest, first]), verifiers=(*rest, "stranger"), families=None)
    with pytest.raises(ValueError, match=f"lacks {first} and also has stranger"):
        fitted.predict_proba(more)


@pytest.mark.full
@quiet
@every
def test_useless_verifiers_break_nothing(make: Callable[[], Aggregator], table: ScoreTable):
    scores = np.concatenate([table.scores, np.full((40, 8, 2), np.nan)], axis=2)
    scores[..., -1][table.present] = 4.0
    spoilt = dataclasses.replace(
        table, scores=scores, verifiers=(*table.verifiers, "absent", "constant"), families=None
    )
    fitted = make().fit(spoilt)
    assert fitted.report.dropped["absent"] == "it never gave a score"
    assert fitted.report.dropped["constant"] == "it always said 4"
    assert fitted.report.verifiers["constant"] == {"coverage": 1.0, "weight": 0.0}
    plain = make().fit(dataclasses.replace(table, families=None))
    np.testing.assert_array_equal(
        fitted.predict_proba(spoilt)[table.present],
        plain.predict_proba(dataclasses.replace(table, families=None))[table.present],
    )


def test_nothing_but_useless_verifiers():
    with pytest.raises(ValueError, match="no verifier is left"):
        RankMean().fit(ScoreTable(np.ones((2, 2, 1)), ("constant",)))


UNSUPERVISED = [maker for maker in MAKERS if not isinstance(maker(), AnchoredLogistic)]


@quiet
@pytest.mark.parametrize("make", UNSUPERVISED, ids=lambda make: type(make()).__name__)
def test_labels_are_not_looked_at(make: Callable[[], Aggregator], table: ScoreTable):
    blind = table.with_labels_of([])
    guess = dataclasses.replace(table, labels=1 - table.labels)
    if isinstance(make(), Auto):
        # Fewer than it uses.
        guess = guess.with_labels_of(range(4))
    found = make().fit(guess).predict_proba(blind)
    np.testing.assert_array_equal(found, make().fit(blind).predict_proba(blind))


@pytest.mark.full
@quiet
@settings(max_examples=4)
@given(st.integers(0, 10_000), st.sampled_from([0.02, 0.1, 0.3, 0.6, 0.8, 0.98]), st.booleans())
def test_the_classes_never_swap(seed: int, balance: float, verdicts: bool):
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
def test_rates_are_recovered_without_labels(balance: float, missing: float):
    truth = generate(200, 50, 20, balance=balance, missing=missing, verdicts=True, seed=1)
    estimated, true = rates(DawidSkene().fit(truth.table.with_labels_of([])), truth)
    assert np.abs(estimated - true).mean() < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("missing", [0.0, 0.2])
@pytest.mark.parametrize("balance", [0.1, 0.3, 0.6])
def test_rates_are_recovered_whatever_the_seed(balance: float, missing: float):
    for seed in range(10):
        truth = generate(500, 100, 33, balance=balance, missing=missing, verdicts=True, seed=seed)
        estimated, true = rates(DawidSkene().fit(truth.table.with_labels_of([])), truth)
        assert np.abs(estimated - true).mean() <= 0.01


def test_a_verifier_worse_than_chance_counts_the_other_way():
    truth = generate(100, 20, 9, verdicts=True, seed=0, areas=(0.7, 0.85))
    scores = truth.table.scores.copy()
    scores[..., 0] = 1 - scores[..., 0]
    fitted = DawidSkene().fit(dataclasses.replace(truth.table, scores=scores).with_labels_of([]))
    found = fitted.report.verifiers[truth.table.verifiers[0]]
    assert found["tpr"] + found["tnr"] < 0.9
    assert auc(fitted.predict_proba(dataclasses.replace(truth.table, scores=scores)), truth.table.labels) > 0.9


def test_a_rank_mean_is_matched_to_the_class_balance(table: ScoreTable):
    p = RankMean(0.2).fit(table).predict_proba(table)
    assert np.nanmean(p) == pytest.approx(0.2, abs=0.01)
    families = RankMean(by_family=True).fit(table).report.verifiers
    weights = [families[name]["weight"] for name in table.verifiers]
    np.testing.assert_allclose(weights, [0.1] * 8 + [0.2])


@pytest.mark.parametrize(("balance", "distance"), [(0.5, 3.0), (0.3, 2.0), (0.1, 4.0)])
def test_the_slope_of_a_rank_mean_is_that_of_two_gaussians(balance: float, distance: float):
    rng = np.random.default_rng(0)
    u = 0.3 * (rng.normal(size=20_000) + distance * (rng.random(20_000) < balance))
    assert fitted_slope(u) == pytest.approx(distance / 0.3 * u.std(), rel=0.1)
    assert all(fitted_slope(rng.normal(size=n)) <= 1.0 for n in (5, 40, 200, 1000, 20_000))


def test_a_rank_mean_that_tells_the_classes_apart_says_so():
    truth = generate(200, 16, 12, balance=0.4, areas=(0.85, 0.9), seed=0).table
    p = RankMean(0.4).fit(truth).predict_proba(truth)
    cautious = RankMean(0.4, slope=1.0).fit(truth).predict_proba(truth)
    assert auc(p, truth.labels) > 0.99
    assert ece(p, truth.labels) < 0.06 < 0.15 < ece(cautious, truth.labels)
    assert (np.argsort(p, axis=None) == np.argsort(cautious, axis=None)).all()


def test_the_published_model_drops_one_sided_verifiers():
    made = generate(50, 10, 6, verdicts=True, seed=0).table
    scores = made.scores.copy()
    scores[..., 0] = np.random.default_rng(0).random((50, 10)) < 0.95
    one_sided = dataclasses.replace(made, scores=scores)
    fitted = PublishedWeaver(class_balance=0.3, threshold=0.5).fit(one_sided)
    assert "outside 20% to 80%" in fitted.report.dropped[made.verifiers[0]]
    with pytest.raises(ValueError, match="3 are needed"):
        PublishedWeaver(class_balance=0.3, threshold=0.5, marginals=(0.49, 0.5)).fit(one_sided)
    holes = np.where(np.random.default_rng(0).random(scores.shape) < 0.1, np.nan, scores)
    warned = PublishedWeaver(class_balance=0.3).fit(dataclasses.replace(made, scores=holes))
    assert "counted as rejections" in warned.report.warnings[0]


def test_few_labels_are_used_well():
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
def test_auto_goes_by_labels_then_by_independence(table: ScoreTable):
    hard = scenario("hard", 0, problems=100).table
    labelled = Auto(agreement=1.0).fit(hard.with_labels_of(range(10)))
    assert labelled.report.method == "Auto: AnchoredLogistic"
    assert labelled.report.warnings == []
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


@pytest.mark.full
def test_auto_where_verifiers_err_together():
    """The mixture beats the rank mean by far where problems differ, and is not trusted where it contradicts it."""
    made = scenario("correlated", 0, problems=150).table
    hidden = made.with_labels_of([])
    with pytest.warns(UserWarning, match="err together .* the correlated mixture is taken"):
        fitted = Auto().fit(hidden)
    p, rank = fitted.predict_proba(hidden), RankMean().fit(hidden).predict_proba(hidden)
    assert selection_accuracy(p, made.labels) > selection_accuracy(rank, made.labels) + 0.05
    assert fitted.report.residual_correlation is not None
    assert fitted.report.residual_correlation > 0.1
    with pytest.warns(UserWarning, match="the rank mean is taken, and that .* no more than a guess"):
        fallen = Auto(agreement=1.0).fit(hidden)
    assert fallen.report.method == "Auto: RankMean"
    order = np.argsort(np.argsort(fallen.predict_proba(hidden), axis=None))
    np.testing.assert_array_equal(order, np.argsort(np.argsort(rank, axis=None)))


@pytest.mark.parametrize("count", [1, 2])
def test_auto_makes_nothing_up_from_one_or_two_verifiers(count: int):
    made = generate(100, 16, count, areas=(0.8, 0.8), seed=0).table
    hidden = made.with_labels_of([])
    with pytest.warns(UserWarning, match="nothing can be inferred without labels.* no more than a guess"):
        fitted = Auto().fit(hidden)
    assert fitted.report.method == "Auto: RankMean"
    rank = RankMean().fit(hidden).predict_proba(hidden)
    np.testing.assert_allclose(fitted.predict_proba(hidden), rank)


@pytest.mark.parametrize("count", [1, 2])
def test_one_right_is_worth_something_to_one_verifier(count: int):
    rng = np.random.default_rng(0)
    right = np.eye(6)[rng.integers(0, 6, 200)]
    made = ScoreTable(2 * right[..., None] + rng.normal(size=(200, 6, count)), tuple("ab"[:count]), labels=right)
    p = Auto(one_right=True).fit(made.with_labels_of([])).predict_proba(made)
    np.testing.assert_allclose(p.sum(1), 1)
    assert selection_accuracy(p, right) > 0.7
    assert ece(p, right) < 0.06


@quiet
@pytest.mark.parametrize("count", [3, 5, 7, 9])
def test_auto_leaves_a_mean_that_shows_two_heaps_as_it_is(count: int):
    """Good verifiers that err together, a third of them verdicts: the mixture would weigh the best ones down."""
    for seed in range(2):
        made = generate(200, 8, count, areas=(0.85, 0.97), correlation=0.6, seed=seed).table
        hidden = made.with_labels_of([])
        fitted = Auto().fit(hidden)
        assert fitted.report.method == "Auto: RankMean"
        p, rank = fitted.predict_proba(hidden), RankMean().fit(hidden).predict_proba(hidden)
        np.testing.assert_array_equal(np.argsort(p, axis=None), np.argsort(rank, axis=None))


@quiet
@pytest.mark.slow
@pytest.mark.parametrize("case", ["independent", "missing", "correlated", "hard"])
def test_auto_is_never_worse_than_the_rank_mean(case: str):
    for seed in range(10):
        made = scenario(case, seed).table
        hidden = made.with_labels_of([])
        p, rank = (one.fit(hidden).predict_proba(hidden) for one in (Auto(), RankMean(0.3)))
        assert selection_accuracy(p, made.labels) >= selection_accuracy(rank, made.labels) - 0.02


@quiet
def test_auto_mistrusts_the_mixture_where_problems_move_the_scores():
    made = generate(150, 16, 16, areas=(0.52, 0.76), correlation=0.5, query_shift=1.2, seed=0).table
    fitted = Auto(agreement=-1.0).fit(made.with_labels_of([]))
    assert fitted.report.details["problem_effect"] > 0.25
    assert fitted.report.method == "Auto: RankMean"


def test_one_right_response_of_each_problem():
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
    """With scores of some responses alone."""
    return dataclasses.replace(table, scores=np.where(mask[..., None], table.scores, np.nan))


def test_losses_are_compared_on_the_same_responses():
    """Only one of five labelled problems has right responses, so it cannot be held out: labels cannot be judged."""
    made = generate(200, 8, 10, balance=0.1, seed=3, areas=(0.6, 0.85)).table
    assert made.labels is not None
    some = made.labels.sum(1) > 0
    labelled = np.concatenate([np.flatnonzero(some)[:1], np.flatnonzero(~some)[:4]])
    shown = made.with_labels_of(labelled)
    anchored = AnchoredLogistic().fit(shown)
    assert np.isnan(anchored.held_out).sum() == 8
    with pytest.warns(UserWarning, match="to hold any out"):
        assert Auto().fit(shown).report.method == "Auto: BinnedDawidSkene"
    two = np.full_like(made.labels, np.nan)
    two[0], two[1] = 1, 0
    none = AnchoredLogistic().fit(dataclasses.replace(made, labels=two))
    assert none.report.details["penalty"] == 1000
    assert none.report.details["log_loss"] is None


@quiet
@every
def test_what_nothing_scored_is_not_learned_from(make: Callable[[], Aggregator], table: ScoreTable):
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
    before, report = fitted.predict_proba(plain), fitted.report.to_dict()
    fitted.partial_fit(only(plain, np.zeros(plain.present.shape, bool)))
    np.testing.assert_array_equal(fitted.predict_proba(plain), before)
    assert fitted.report.to_dict() == report


def test_coverage_is_of_all_that_was_learned_from():
    plain = ScoreTable(np.random.default_rng(0).normal(size=(20, 4, 3)), ("a", "b", "c"))
    later = plain.scores.copy()
    later[..., 0] = np.nan
    later[:10] = np.nan
    for make in (BinnedDawidSkene, Auto):
        fitted = make().fit(plain).partial_fit(ScoreTable(later, plain.verifiers))
        assert fitted.report.coverage == pytest.approx(0.75)
        assert [fitted.report.verifiers[name]["coverage"] for name in "abc"] == pytest.approx([0.5, 0.75, 0.75])


def test_an_unscored_response_may_be_the_right_one():
    """It counts with evidence 0 against the others, and has no probability of its own."""
    made = generate(40, 10, 6, seed=0).table.with_labels_of([])
    fitted = CorrelatedMixture(one_right=True).fit(made)
    gone = np.ones((40, 10), bool)
    gone[0, 5:] = False
    p = fitted.predict_proba(only(made, gone))[0]
    assert np.isnan(p[5:]).all()
    evidence = fitted.evidence(fitted._data(made))[:5]
    np.testing.assert_allclose(p[:5], np.exp(evidence) / (np.exp(evidence).sum() + 5))
    mean = RankMean(0.3).fit(only(made, gone)).predict_proba(only(made, gone))
    assert np.nanmean(mean) == pytest.approx(0.3)


@pytest.mark.parametrize(
    "make", [BinnedDawidSkene, DawidSkene, CorrelatedMixture, Online], ids=lambda make: make.__name__
)
def test_one_problem_more_does_not_move_the_prior(make: Callable[[], Aggregator]):
    made = generate(300, 8, 9, balance=0.4, areas=(0.65, 0.8), seed=0).table
    assert made.labels is not None
    hidden, test = made.with_labels_of([]), made.take(range(200, 300))
    fitted = make().fit(hidden.take(range(200)))
    before = fitted.predict_proba(test)
    fitted.partial_fit(hidden.take(np.flatnonzero(made.labels[:200].sum(1) == 0)[:1]))
    assert np.abs(fitted.predict_proba(test) - before).mean() < 0.01


@pytest.mark.full
@pytest.mark.parametrize("balance", [0.02, 0.98])
def test_nearly_all_wrong_or_right(balance: float):
    made = generate(120, 16, 12, balance=balance, seed=0, areas=(0.6, 0.85)).table
    hidden = made.with_labels_of([])
    rank = auc(RankMean().fit(hidden).predict_proba(hidden), made.labels)
    for make in (BinnedDawidSkene, CorrelatedMixture):
        fitted = make().fit(hidden)
        p = fitted.predict_proba(hidden)
        assert ece(p, made.labels) < 0.1
        assert auc(p, made.labels) > rank - 0.02
        assert not dataclasses.replace(make(), steps=2).fit(hidden).report.details["converged"]


@pytest.mark.full
@quiet
@pytest.mark.parametrize("make", UNSUPERVISED, ids=lambda make: type(make()).__name__)
def test_the_order_of_verifiers_does_not_matter(make: Callable[[], Aggregator]):
    made = scenario("correlated", 0, problems=30, responses=8, verifiers=12).table.with_labels_of([])
    turned = made.select([made.verifiers[v] for v in np.random.default_rng(0).permutation(12)])
    np.testing.assert_allclose(
        make().fit(turned).predict_proba(turned), make().fit(made).predict_proba(made), atol=1e-9
    )


@quiet
def test_auto_knows_that_one_is_right():
    rng = np.random.default_rng(0)
    right = np.eye(6)[rng.integers(0, 6, 200)]
    made = ScoreTable(right[..., None] + rng.normal(size=(200, 6, 5)), tuple("abcde"), labels=right)
    hidden = made.with_labels_of([])
    fitted = Auto(one_right=True).fit(hidden)
    assert fitted.report.residual_correlation is not None
    assert fitted.report.residual_correlation < 0.05
    np.testing.assert_allclose(fitted.predict_proba(hidden).sum(1), 1)
    with pytest.warns(UserWarning, match="the rank mean is taken;"):
        fallen = Auto(one_right=True, gate=-1.0, agreement=2.0).fit(hidden)
    assert fallen.report.class_balance == pytest.approx(1 / 6)


def test_the_published_posterior_is_that_of_all_four_entries():
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


def test_a_failed_fit_leaves_what_was_there(table: ScoreTable):
    unfitted = AnchoredLogistic()
    with pytest.raises(ValueError, match="two labelled problems"):
        unfitted.fit(table.with_labels_of([]))
    with pytest.raises(ValueError, match="has not been fitted"):
        unfitted.predict_proba(table)
    fitted = RankMean().fit(table)
    before = fitted.predict_proba(table)
    with pytest.raises(ValueError, match="no verifier is left"):
        fitted.fit(ScoreTable(np.ones((2, 2, 1)), ("constant",)))
    np.testing.assert_array_equal(fitted.predict_proba(table), before)


def test_settings_that_cannot_be(table: ScoreTable):
    for make in (RankMean, BinnedDawidSkene, CorrelatedMixture, PublishedWeaver, Auto):
        for balance in (0.0, 1.0, -1.0, float("nan")):
            with pytest.raises(ValueError, match="class_balance is the share"):
                make(class_balance=balance).fit(table)
    with pytest.raises(TypeError, match="bins"):
        DawidSkene(bins=8)  # type: ignore[call-arg]
    for balance in (0.002, 0.998):
        assert BinnedDawidSkene(class_balance=balance).fit(table).report.class_balance == pytest.approx(balance)


def test_arrays_that_a_file_lacks_or_has_too_many_of(table: ScoreTable, tmp_path: Path):
    BinnedDawidSkene().fit(table).save(tmp_path / "fit.npz")
    with np.load(tmp_path / "fit.npz") as file:
        arrays = dict(file)
    header = json.loads(arrays["header"].tobytes())
    header["verifiers"] = header["verifiers"][:2]
    fewer = np.frombuffer(json.dumps(header).encode(), np.uint8)
    for changed, said in (
        ({name: value for name, value in arrays.items() if name != "ratios"}, "lacks 'ratios'"),
        ({**arrays, "more": np.ones(1)}, "also has more"),
        ({**arrays, "header": fewer}, "out of range for 2 verifiers"),
    ):
        np.savez(tmp_path / "odd.npz", **changed)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=said):
            load(tmp_path / "odd.npz")
    whole = (tmp_path / "fit.npz").read_bytes()
    for at in range(0, len(whole), len(whole) // 40):
        (tmp_path / "bent.npz").write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with contextlib.suppress(ValueError):  # nothing else, such as zlib.error
            load(tmp_path / "bent.npz")


def test_a_table_too_small_to_judge():
    made = generate(3, 4, 5, seed=0).table.with_labels_of([])
    with pytest.warns(UserWarning, match="too few responses"):
        p = Auto().fit(made).predict_proba(made)
    assert ((p >= 0) & (p <= 1)).all()


@pytest.mark.full
@quiet
@pytest.mark.filterwarnings("ignore:too few responses:UserWarning")
@every
def test_odd_tables(make: Callable[[], Aggregator]):
    """Twins, a verifier that is right every time, hardly any scores, two by two: a probability or a clear error."""
    plain = generate(30, 6, 5, seed=0).table
    twins = dataclasses.replace(
        plain, scores=np.concatenate([plain.scores] * 2, axis=2), verifiers=tuple(f"v{i}" for i in range(10))
    )
    assert plain.labels is not None
    perfect = dataclasses.replace(plain, scores=np.repeat(plain.labels[..., None], 5, axis=2))
    sparse = generate(60, 6, 8, missing=0.85, seed=0).table
    for odd in (twins, perfect, sparse, generate(2, 2, 3, seed=1).table, generate(40, 1, 6, seed=0).table):
        if isinstance(make(), CorrelatedMixture) and make().one_right and odd.scores.shape[1] == 1:  # type: ignore[attr-defined]
            with pytest.raises(ValueError, match="problems of several responses"):
                make().fit(odd)
            continue
        with np.errstate(invalid="raise", divide="raise", over="raise"):
            p = make().fit(odd).predict_proba(odd)
        known = p[~np.isnan(p)]
        assert known.size
        assert ((known >= 0) & (known <= 1)).all()
