"""An ensemble as a reward: what the whole group gets, what overrides it, and how it follows."""

import asyncio

import numpy as np
import pytest

from forge.rewards import Scores
from forge.rewards.reward import Reward
from forge_verifiers import Panel, Rule
from forge_weaver import BinnedDawidSkene, Ensemble, Online, RankMean, ScoreTable

NAMES = ("a", "b", "c", "d")


class Written:
    """A verifier whose scores are written in the responses, a number each, "?" where there is none."""

    names = NAMES

    async def score(self, prompt, responses, target=None):
        values = np.array([[np.nan if word == "?" else float(word) for word in text.split()] for text in responses])
        return Scores(values, {(int(i), int(j)): "it says ?" for i, j in np.argwhere(np.isnan(values))})


def table(problems=200, seed=0):
    """Four verifiers that see the truth through noise of their own."""
    rng = np.random.default_rng(seed)
    truth = rng.random((problems, 8)) < 0.4
    return ScoreTable(1.5 * truth[:, :, None] + rng.normal(size=(problems, 8, 4)), NAMES, labels=truth.astype(float))


def rewards(reward, texts, target=None):
    scores = asyncio.run(reward.score("p", texts, target))
    assert {i for i, _ in scores.reasons} == {*np.flatnonzero(np.isnan(scores.values[:, 0]))}
    return [None if np.isnan(value) else value for value in scores.values[:, 0].tolist()]


@pytest.fixture(scope="module")
def fitted():
    return BinnedDawidSkene().fit(table())


GROUP = ["2 2 2 2", "-1 -1 -1 -1", "2 -1 ? ?", "? ? ? ?"]


def test_ensemble_reward_is_probability_or_none(fitted):
    right, wrong, mixed, unknown = rewards(Ensemble.over(Panel([Written()]), fitted), GROUP)
    assert right > 0.95
    assert wrong < 0.05
    assert wrong < mixed < right
    assert unknown is None
    group = [[2.0] * 4, [-1.0] * 4, [2.0, -1.0, np.nan, np.nan], [np.nan] * 4]
    expected = fitted.predict_proba(ScoreTable([group], NAMES))[0, :3]
    assert [right, wrong, mixed] == pytest.approx(expected.tolist())


def test_in_memory_weaver_ensemble_works_as_reward(fitted):
    reward = Reward([Ensemble.over(Panel([Written()]), fitted)], accuracy=lambda prompt, response, target: 1.0)
    reward.setup()  # reads no folder
    scores = asyncio.run(reward.score("p", GROUP, None))
    assert [score.reward for score in scores] == rewards(Ensemble.over(Panel([Written()]), fitted), GROUP)


def test_ensemble_logit_reward_is_clipped_and_threshold_reward_binary(fitted):
    panel = Panel([Written()])
    p = rewards(Ensemble.over(panel, fitted), GROUP)
    assert rewards(Ensemble.over(panel, fitted, form="logit", clip=1.0), GROUP)[:2] == [1.0, -1.0]
    wide = rewards(Ensemble.over(panel, fitted, form="logit", clip=50.0), GROUP)
    assert 1 / (1 + np.exp(-wide[2])) == pytest.approx(p[2])
    assert rewards(Ensemble.over(panel, fitted, form="threshold", threshold=0.9), GROUP) == [1.0, 0.0, 0.0, None]


def test_ensemble_veto_precedes_decision_which_precedes_probability(fitted):
    def says(prompt, response, target):
        return {"y": 1.0, "n": 0.0}.get(target)

    def short(prompt, response, target):
        return float(len(response) < 9)

    panel = Panel([Written(), Rule(says), Rule(short)])
    reward = Ensemble.over(panel, fitted, decide=["says"], veto=["short"])
    assert rewards(reward, ["-1 -1 -1 -1"], "y") == [0.0]  # vetoed: too long
    assert (rewards(reward, ["0 0 0 0"], "y"), rewards(reward, ["2 2 2 2"], "n")) == ([1.0], [0.0])
    undecided = rewards(Ensemble.over(panel, fitted, decide=["says"]), ["2 2 2 2"], "?")
    assert undecided == rewards(Ensemble.over(panel, fitted), ["2 2 2 2"])


def test_unscored_veto_verifier_leaves_ensemble_reward_unscored(fitted):
    def by_target(at):
        def says(prompt, response, target):
            return {"y": 1.0, "n": 0.0}.get(target[at])

        return says

    panel = Panel([Written(), *(Rule(by_target(at), name) for at, name in enumerate("efgh"))])
    reward = Ensemble.over(panel, fitted, decide=["e", "f"], veto=["g", "h"])
    given = {target: rewards(reward, ["2 2 2 2"], target)[0] for target in ("y?yy", "n?yy", "yyy?", "n?y?", "??n?")}
    assert given == {"y?yy": 1.0, "n?yy": 0.0, "yyy?": None, "n?y?": 0.0, "??n?": 0.0}
    assert rewards(reward, ["2 2 2 2", "-1 -1 -1 -1"], "????") == [None, None]


def test_online_ensemble_reward_updates_and_records_alarms():
    reward = Ensemble.over(Panel([Written()]), Online().fit(table()), follow=4)
    before = reward.aggregator
    rng = np.random.default_rng(1)

    async def judge(number):
        for truth in rng.random((number, 8)) < 0.4:
            scores = 1.5 * truth[:, None] + rng.normal(size=(8, 4))
            scores[:, 3] = 3 + 0.01 * rng.normal(size=8)  # the last verifier is content with everything
            await reward.score("p", [" ".join(map(str, row)) for row in scores])

    asyncio.run(judge(3))
    assert reward.aggregator is before
    with pytest.warns(UserWarning, match="d: "):
        asyncio.run(judge(61))
    assert reward.aggregator.report.problems > before.report.problems
    alarms = reward.aggregator.report.alarms
    assert alarms
    assert all(alarm.startswith("d: ") for alarm in alarms)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"form": "odds"}, "form must be one of"),
        ({"form": "threshold", "threshold": 0.0}, "threshold above 0"),
        ({"veto": ["e"]}, "the panel needs the verifiers e"),
    ],
)
def test_invalid_weaver_reward_raises(fitted, settings, message):
    with pytest.raises(ValueError, match=message):
        Ensemble.over(Panel([Written()]), fitted, **settings)


def test_weaver_panel_without_fitted_verifiers_raises():
    with pytest.raises(ValueError, match="the panel needs the verifiers a, b, c, d"):
        Ensemble.over(Panel([Rule(lambda p, r, t: 1.0, "other")]), RankMean().fit(table(20)))
