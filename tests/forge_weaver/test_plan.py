"""Plans of runs whose reward is an ensemble: the models that its folder names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from forge.rewards.config import VerifiersConfig
from forge_inspect.cli.plan import planned
from forge_inspect.plan.components import Plan
from forge_weaver import RankMean, ScoreTable, save_ensemble
from tests.forge_inspect.test_plan import small_scorer

RECIPE = "apps/grpo/qwen3_1_7b.yaml"
ON_GPU = ["--services.reward.with_gpus", "true"]


def plan_of(reward: dict[str, object]) -> Plan:
    settings = reward | {"accuracy": "MathReward"}
    words = [*ON_GPU, "--reward", yaml.safe_dump(settings, default_flow_style=True, width=10**6)]
    return planned(RECIPE, words, "4xH100")[1]


def reward_parts(reward: dict[str, object]) -> dict[str, float]:
    plan = plan_of(reward)
    (component,) = [component for component in plan.components if component.name == "reward"]
    assert not any("not in this plan" in note for note in plan.notes)
    return component.parts


def test_the_models_of_an_ensemble_are_planned(tmp_path: Path):
    scorers = [small_scorer(tmp_path / kind, kind) for kind in ("qwen3", "llama", "modernbert")]
    (scorers[2] / "distilled.json").write_text(json.dumps({"reading": {}}))
    models = [{"path": str(folder), "batch_tokens": 2048} for folder in scorers]
    distilled = {"use": "forge_weaver:Distilled", **models[2]}
    panel = VerifiersConfig(reward_models=models[:2], plugins=[distilled])
    scores = np.random.default_rng(0).normal(size=(50, 4, 3))
    save_ensemble(tmp_path / "ensemble", panel, RankMean().fit(ScoreTable(scores, tuple(panel.names))))
    from_folder = reward_parts({"functions": [{"use": "forge_weaver:Ensemble", "path": str(tmp_path / "ensemble")}]})
    # The same three models, named by the recipe itself.
    assert from_folder == reward_parts({"verifiers": {"reward_models": models}})
    assert from_folder["weights"] > 0
    alone = reward_parts({"functions": [distilled]})
    assert 0 < alone["weights"] < from_folder["weights"]
    assert alone == reward_parts({"verifiers": {"plugins": [distilled]}})


def test_an_ensemble_that_is_not_fitted_yet_is_said(tmp_path: Path):
    plan = plan_of({"functions": [{"use": "forge_weaver:Ensemble", "path": str(tmp_path / "later")}]})
    (note,) = [note for note in plan.notes if "reward" in note]
    assert note == (
        f"the reward's models are not in this plan: {tmp_path / 'later'} is not an ensemble: it has no verifiers.yaml"
    )


@pytest.mark.parametrize("recipe", ["qwen3_8b_grpo", "qwen3_32b_grpo"])
def test_the_recipes_say_that_their_ensemble_comes_first(recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    apps = Path("apps").resolve()
    monkeypatch.chdir(tmp_path)
    _, plan = planned(str(apps / "weaver" / f"{recipe}.yaml"), [], "32xH100")
    assert any("is not an ensemble" in note for note in plan.notes)
