"""Rewards of all kinds behind one actor."""

import asyncio

import numpy as np
import pytest

from forge.actors import RewardActor, VerifierActor
from forge.verifiers.spec import VerifiersConfig
from forge.verifiers.weaver import BinnedDawidSkene, EnsembleConfig, ScoreTable, save_ensemble
from tests.actors.respawn import started

RULES = VerifiersConfig(rules=["apps.weaver.rules:right_length", "apps.weaver.rules:first_letter"])
GROUP = ["cba", "abc", "b"]


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory):
    """Of two rules, fitted to what they say of right and wrong words."""
    folder, rng = tmp_path_factory.mktemp("ensemble"), np.random.default_rng(0)
    right = rng.random((100, 8, 1)) < 0.5
    said = np.where(rng.random((100, 8, 2)) < 0.9, right, ~right).astype(float)
    fitted = BinnedDawidSkene(class_balance=0.5).fit(ScoreTable(said, tuple(RULES.names)))
    save_ensemble(folder, RULES, fitted)
    return str(folder)


def rewards(actor, group=GROUP, target="cba"):
    return asyncio.run(actor.evaluate_group("abc>", group, target))


def test_verifiers_add_up_on_their_own_scales_and_with_functions():
    assert rewards(started(RewardActor(verifiers=RULES))) == [2.0, 1.0, 0.0]
    both = started(RewardActor(["ExactMatch"], verifiers=RULES))
    assert rewards(both) == [3.0, 1.0, 0.0]
    assert asyncio.run(both.is_correct("abc>", "cba", "cba"))


def test_an_ensemble_gives_probabilities_and_its_form_can_be_chosen(ensemble):
    high, middle, low = rewards(started(RewardActor(ensemble=EnsembleConfig(ensemble))))
    assert 0 < low < middle < high < 1
    assert high > 0.9
    ones = started(RewardActor(ensemble=EnsembleConfig(ensemble, form="threshold", threshold=0.9)))
    assert rewards(ones) == [1.0, 0.0, 0.0]
    vetoed = started(RewardActor(ensemble=EnsembleConfig(ensemble, veto=["first_letter"])))
    assert rewards(vetoed)[1:] == [0.0, 0.0]


def test_a_response_that_a_verifier_cannot_score_has_no_reward():
    broken = VerifiersConfig(rules=["apps.weaver.rules:right_length", f"{__name__}:short_alone"])
    assert rewards(started(RewardActor(verifiers=broken))) == [None, None, 1.0]


def short_alone(prompt, response, target):
    if len(response) > 1:
        raise RuntimeError("too long for me")
    return 1.0


def test_without_a_function_nothing_is_known_to_be_right(ensemble):
    actor = started(RewardActor(ensemble=EnsembleConfig(ensemble)))
    with pytest.raises(ValueError, match=r"set reward\.accuracy"):
        asyncio.run(actor.is_correct("abc>", "cba", "cba"))
    with pytest.raises(ValueError, match="at least one function"):
        RewardActor([])


def test_a_panel_is_a_service_too():
    actor = started(VerifierActor(RULES))
    scores = asyncio.run(actor.score("abc>", GROUP))
    assert scores.values.tolist() == [[1, 1], [1, 0], [0, 0]]
    assert asyncio.run(actor.names()) == ("right_length", "first_letter")
