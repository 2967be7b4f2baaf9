"""Names of other libraries' settings: errors say what stands for them here, and it exists."""

import re
from typing import Any

import pytest

import forge
from forge.config import ConfigError, keys_of, section_in
from forge.config.sections import build
from forge.recipes.dpo import DPOConfig
from forge.recipes.rl_config import RLConfig
from forge.recipes.sft import SFTConfig
from forge_compat.setting_names import TABLES, explain_names


def has_key(path: str) -> bool:
    """Whether a recipe has a key of this dotted path, or an algorithm a setting of `grpo`."""
    if path.startswith(("grpo.", "algorithm")):
        return True
    for recipe in (RLConfig, SFTConfig, DPOConfig):
        hint: Any = recipe
        for name in path.split("."):
            section = section_in(hint)
            if section is None or name not in keys_of(section):
                break
            hint = keys_of(section)[name].annotation
        else:
            return True
    return False


def test_replacement_keys_of_foreign_settings_exist():
    named = [here.partition("=")[0] for table in TABLES.values() for here in table.values() if " " not in here]
    assert len(named) > 50
    assert [key for key in named if re.fullmatch(r"[a-z_.0-9]+", key) and not has_key(key)] == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("num_generations", "TRL's num_generations is grpo.n_samples here"),
        ("rollout", "rollout is now grpo"),
        ("critic.optim.lr", "verl's critic.optim.lr is critic.learning_rate here"),
    ],
)
def test_foreign_config_key_error_names_forge_key(name: str, says: str):
    with pytest.raises(ConfigError, match=re.escape(says)):
        build(RLConfig, {"model": "x", "dataset": {"path": "y"}, name: 1})
    assert says in explain_names([name])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"dataset": [{"question": "a"}], "per_device_train_batch_size": 4}, "TRL's per_device_train_batch_size"),
        ({"train_dataset": [{"question": "a"}]}, "TRL's train_dataset is dataset here"),
        ({"dataset": [{"question": "a"}], "lora_r": 4}, "TRL's lora_r is lora={'rank': ...} (lora.rank in YAML)"),
        (
            {"dataset": [{"question": "a"}], "bf16": True},
            "TRL's bf16 is training={'dtype': 'bfloat16'} (training.dtype",
        ),
        (
            {"dataset": [{"question": "a"}], "ref_model": {}},
            "TRL's ref_model is services={'ref_model': ...} (services.",
        ),
        (
            {"dataset": [{"question": "a"}], "algorithm": {"adv_estimator": "grpo"}},
            "got {'adv_estimator': 'grpo'}: verl's algorithm.adv_estimator is algorithm here",
        ),
    ],
)
def test_foreign_train_argument_error_names_forge_key(arguments: dict, says: str):
    with pytest.raises(ConfigError, match=re.escape(says)):
        forge.train("nowhere", reward="ExactMatch", **arguments)


def test_foreign_settings_error_names_best_matching_library():
    text = explain_names(["actors.trainer.procs", "provisioner.launcher", "trainer.optimizer.lr", "group_size"])
    assert "TRL" not in text
    assert "actors.trainer.procs is services.trainer.procs here; torchforge's provisioner.launcher is cluster" in text
    assert "torchforge's trainer.optimizer.lr is training.learning_rate here" in text
    assert explain_names(["trainer.optimizer.lr", "num_generations"]).count("TRL's") == 1
