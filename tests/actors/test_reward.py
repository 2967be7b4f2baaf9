"""Rewards of all kinds behind one actor."""

import asyncio
import json
import pickle

import numpy as np
import pytest

from forge.actors import RewardActor
from forge.config import ConfigError
from forge.observability.metrics import drain
from forge.recipes.schema import RewardConfig
from forge.rewards.reward import FunctionVerifier
from forge.runtime.controller import shutdown
from forge_verifiers import Panel
from forge_verifiers.actors import VerifierActor
from forge_verifiers.config import VerifiersConfig
from forge_weaver import (
    BinnedDawidSkene,
    Ensemble,
    Online,
    ScoreTable,
    save_ensemble,
)
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


def checked(path, **settings):
    RewardConfig(functions=[{"use": "forge_weaver:Ensemble", "path": str(path), **settings}]).open()


def rewards(actor, group=GROUP, target="cba"):
    return asyncio.run(actor.evaluate_group("abc>", group, target))


def test_verifier_and_function_rewards_are_summed():
    assert rewards(started(RewardActor(verifiers=RULES))) == [2.0, 1.0, 0.0]
    both = started(RewardActor(["ExactMatch"], verifiers=RULES))
    assert rewards(both) == [3.0, 1.0, 0.0]
    assert asyncio.run(both.reward.judge("abc>", ["cba"], "cba")) == [True]


@pytest.mark.full
@pytest.mark.processes
def test_long_repetitive_responses_do_not_kill_reward_replicas():
    async def work():
        service = await RewardActor.options(num_replicas=2).as_service(["MathReward"])
        try:
            texts = [unit * 200_000 for unit in ("\n", " ", "9", "{", "\\")]
            found = await asyncio.gather(*(service.evaluate_group.route("q", texts, "5") for _ in range(4)))
            return found, service.status().restarts
        finally:
            await shutdown()

    assert asyncio.run(work()) == ([[0.0] * 5] * 4, 0)


def test_unscored_response_has_reward_none_and_a_reason(caplog):
    broken = VerifiersConfig(rules=["apps.weaver.rules:right_length", f"{__name__}:short_alone"])
    with caplog.at_level("WARNING"):
        assert rewards(started(RewardActor(verifiers=broken))) == [None, None, 1.0]
    missing = {name: value for name, value in drain().values().items() if name.startswith("missing/")}
    assert missing == {"missing/right_length": 0.0, "missing/short_alone": pytest.approx(2 / 3)}
    assert [record.message for record in caplog.records if "too long for me" in record.message] == [
        "verifier short_alone did not score a response: RuntimeError: too long for me"
    ]


def short_alone(prompt, response, target):
    if len(response) > 1:
        raise RuntimeError("too long for me")
    return 1.0


def test_failing_scorer_close_still_closes_other_scorers(ensemble, monkeypatch):
    closed = []

    async def failing(panel):
        closed.append(panel)
        raise OSError("cannot be closed")

    monkeypatch.setattr(Panel, "close", failing)
    actor = started(RewardActor([Ensemble(ensemble)], verifiers=RULES))
    with pytest.raises(OSError, match="cannot be closed"):
        asyncio.run(actor.teardown())
    assert len(closed) == 2


class Short:
    def score_group(self, prompt, responses, target):
        return asyncio.sleep(0, responses[1:])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda prompt, response, target: float("inf"), "gave inf: give a finite number"),
        (lambda prompt, response, target: "1", "gave '1': give a finite number"),
        (Short(), "the reward Short must return 3 scores, one a response, got 2"),
    ],
)
def test_invalid_reward_actor_scorers_raise(function, message):
    with pytest.raises(ValueError, match=message):
        rewards(started(RewardActor([function])))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"veto": ["nobody"]},
            "reward.functions: veto: nobody must be one of the ensemble's verifiers: right_length, first_letter",
        ),
        ({"follow": 8}, "follow needs an ensemble of method online, got BinnedDawidSkene"),
    ],
)
def test_invalid_ensemble_raises_before_start(ensemble, tmp_path, settings, message):
    checked(ensemble)
    with pytest.raises(ConfigError, match=message):
        checked(ensemble, **settings)
    with pytest.raises(ConfigError, match="is not an ensemble"):
        checked(tmp_path)
    (tmp_path / "verifiers.yaml").write_text("rules: [a, ")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        checked(tmp_path)


def test_restored_online_ensemble_continues_identically(tmp_path):
    """With the groups that it is still to learn from: both go on alike."""
    rng = np.random.default_rng(0)
    right = rng.random((100, 8, 1)) < 0.5
    said = np.where(rng.random((100, 8, 2)) < 0.8, right, ~right).astype(float)
    save_ensemble(tmp_path, RULES, Online().fit(ScoreTable(said, tuple(RULES.names))))
    following = RewardActor([Ensemble(str(tmp_path), follow=4)])
    before = started(following)
    first = rewards(before)
    for _ in range(9):
        rewards(before)
    states = [asyncio.run(before.state_dict())]
    again = started(RewardActor([Ensemble(str(tmp_path), follow=4)]))
    assert rewards(again) == first
    asyncio.run(again.load_state_dict(pickle.loads(pickle.dumps(states))))
    learned = [rewards(before) for _ in range(4)]
    assert learned[0] != first
    assert learned[-1] != learned[0]
    assert [rewards(again) for _ in range(4)] == learned
    still = started(RewardActor(["ExactMatch"]))
    assert asyncio.run(still.state_dict()) is None
    with pytest.raises(ValueError, match="has the state of a reward that learns"):
        asyncio.run(still.load_state_dict(states))
    deaf = started(RewardActor([Ensemble(str(tmp_path))]))
    with pytest.raises(ValueError, match="no configured reward learns: resume with the reward of the checkpoint"):
        asyncio.run(deaf.load_state_dict(states))
    swapped = VerifiersConfig(rules=RULES.rules[::-1])
    save_ensemble(tmp_path / "other", swapped, Online().fit(ScoreTable(said, tuple(swapped.names))))
    other = started(RewardActor([Ensemble(str(tmp_path / "other"), follow=4)]))
    with pytest.raises(ValueError, match="of right_length, first_letter was saved, but this ensemble has first_letter"):
        asyncio.run(other.load_state_dict(states))


@pytest.mark.processes
def test_reward_actor_code_verifier_runs_programs_in_sandbox():
    verifiers = VerifiersConfig(plugins=[{"use": "forge_sandbox:CodeVerifier", "credit": "share"}])
    verifiers.check_sources()
    actor = started(RewardActor(verifiers=verifiers))
    tests = json.dumps([{"call": "f(2)", "value": "4"}, {"call": "f(3)", "value": "9"}])
    programs = ["def f(x):\n    return x * x", "def f(x):\n    return x + x", "print(1"]
    assert rewards(actor, [f"```python\n{program}\n```" for program in programs], tests) == [1.0, 0.5, 0.0]
    asyncio.run(actor.teardown())
    assert rewards(actor, ["```python\nprint()\n```"], tests) == [None]  # its sandbox is closed
    service = started(VerifierActor(verifiers))
    asyncio.run(service.teardown())
    assert "the sandbox is closed" in asyncio.run(service.score("", ["```python\n```"], tests)).reasons[0, 0]
    directly = started(RewardActor([{"use": "forge_sandbox:CodeVerifier", "credit": "share"}]))
    assert rewards(directly, [f"```python\n{program}\n```" for program in programs], tests) == [1.0, 0.5, 0.0]
    asyncio.run(directly.teardown())


class Raising:
    """A reward that raises what it is given, in a thread or in the event loop."""

    def __init__(self, error: BaseException):
        self.error = error

    def __call__(self, prompt, response, target):
        raise self.error


class RaisingLater(Raising):
    """The same in the event loop."""

    async def __call__(self, prompt, response, target):
        raise self.error


IN_A_THREAD = [StopIteration(), asyncio.CancelledError(), GeneratorExit(), SystemExit(0), KeyboardInterrupt()]


@pytest.mark.parametrize(
    ("kind", "error"),
    [*((Raising, error) for error in IN_A_THREAD), (RaisingLater, SystemExit(0)), (RaisingLater, KeyboardInterrupt())],
)
def test_reward_calling_sys_exit_does_not_end_reward_actor(kind, error):
    scored = asyncio.wait_for(FunctionVerifier(kind(error)).score("abc>", GROUP, "cba"), 10)
    with pytest.raises(RuntimeError, match=f"^the reward {kind.__name__} raised {type(error).__name__}") as caught:
        asyncio.run(scored)
    assert caught.value.__cause__ is error
    assert "scored prompt 'abc>'" in caught.value.__notes__[0]
