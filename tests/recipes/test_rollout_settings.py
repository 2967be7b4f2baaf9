"""A run whose sampling is bounded: engine and trainer agree on its tokens, and texts end its answers."""

from pathlib import Path

import pytest

import forge
from forge.config import ConfigError
from forge.recipes.rl_config import AlgorithmConfig

ROWS = [{"question": word, "answer": word[::-1]} for word in ("abc", "cab", "bca", "acb")]


@pytest.mark.processes
def test_engine_and_trainer_logprobs_agree_with_top_p(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    result = forge.train(
        None,
        from_scratch={"alphabet": "abc>", "max_positions": 32},
        dataset=ROWS,
        prompt_template="{question}>",
        reward="CharacterMatch",
        name="bounded",
        steps=3,
        batch_size=4,
        n_samples=8,
        max_tokens=12,
        seq_len=512,
        learning_rate=1e-2,
        max_policy_age=0,
        services={"reward": None},
        temperature=0.8,
        top_p=0.7,
        repetition_penalty=1.2,
        stop=["bb"],
    )
    differences = [row["train/engine_difference"] for row in result.metrics if "train/engine_difference" in row]
    assert len(differences) == 3
    assert max(differences) < 1e-5
    assert all(row["train/ratio_max_deviation"] < 1e-4 for row in result.metrics if "reward" in row)
    assert not any("bb" in rollout["response"][:-1] for rollout in result.rollouts)


def test_rollout_sampling_settings_contain_only_set_values():
    assert AlgorithmConfig().sampling() == {}
    assert AlgorithmConfig(stop=["x"]).sampling() == {"stop": ("x",)}
    assert AlgorithmConfig(top_k=5).sampling() == {"top_k": 5, "logprobs_of": "policy"}
    for settings, message in (
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"stop": [""]}, "grpo.stop must not contain an empty text: omit it"),
        ({"stop": "x"}, "stop must be a list"),
    ):
        with pytest.raises(ConfigError, match=message):
            AlgorithmConfig(**settings)
