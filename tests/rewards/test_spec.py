"""Verifiers as data: read, checked, written down, and made."""

import asyncio
import json

import pytest
import yaml

from forge.config import ConfigError, build, to_dict
from forge_verifiers.config import VerifiersConfig
from tests.training.cases import write_classifier

JUDGE = {"url": "http://127.0.0.1:1/v1", "model": "judge"}


def always(prompt, response, target):
    return 1.0


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return str(write_classifier(tmp_path_factory.mktemp("spec") / "rm"))


def values(classifier):
    return {
        "rules": ["ThinkingReward", "tests.rewards.test_spec:always"],
        "reward_models": [{"path": classifier}, {"path": classifier, "name": "second", "scale": "probability"}],
        "judges": [{**JUDGE, "votes": 3}],
        "math": True,
        "answer_frequency": "final_answer",
        "timeout": 20,
    }


def test_verifier_panel_round_trips_through_yaml(classifier):
    config = build(VerifiersConfig, yaml.safe_load(yaml.safe_dump(values(classifier))))
    config.check_sources()
    for again in (json.loads(json.dumps(to_dict(config))), yaml.safe_load(yaml.safe_dump(to_dict(config)))):
        assert build(VerifiersConfig, again) == config
    panel = config.panel()
    assert panel.names == ("ThinkingReward", "always", "math", "answer_frequency", "rm", "second", "judge")
    assert panel.timeout == 20
    asyncio.run(panel.close())


def test_process_reward_model_is_built_from_yaml(tmp_path):
    from transformers import AutoModelForTokenClassification

    from tests.training.cases import TOKENIZER, tiny_model

    tiny_model(kind=AutoModelForTokenClassification).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    spec = {"path": str(tmp_path), "name": "prm", "marker": "z"}
    config = build(VerifiersConfig, {"process_reward_models": [spec]})
    config.check_sources()
    panel = config.panel()
    assert panel.names == ("prm_min", "prm_mean", "prm_last")
    asyncio.run(panel.close())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, "has no verifier: set rules"),
        ({"rules": ["NoSuch"]}, "reward 'NoSuch' was not found"),
        ({"answer_frequency": "no.such:thing"}, "answer function 'no.such:thing' was not found"),
        ({"rules": ["MathReward", "MathReward"]}, "two are called MathReward"),
        ({"rules": ["MathReward"], "timeout": 0}, "timeout must be above 0"),
        (
            {"reward_models": [{"path": "no/such/folder"}]},
            r"reward_models\[0\].path: no/such/folder is not a model directory",
        ),
        ({"reward_models": [{"path": "tests/nosuch"}]}, "tests/nosuch is not a model directory"),
        ({"reward_models": [{"path": "tests"}]}, "tests is not a model directory"),
        ({"reward_models": [{"path": "m", "as_pair": True, "append_eos": True}]}, r"\[0\]: as_pair passes"),
        ({"reward_models": [{"path": "m", "prompt_template": "{other}"}]}, "no field 'other'"),
        ({"reward_models": [{"path": "m", "system_prompt": "be"}]}, "need chat_template"),
        ({"process_reward_models": [{"path": "m", "marker": "z", "good": "+"}]}, "both good and bad"),
        ({"process_reward_models": [{"path": "m", "marker": "z", "separator": "("}]}, "not a regular expression"),
        ({"plugins": [{"use": "forge_weaver:Distilled", "path": "tests"}]}, "tests is not a distilled verifier"),
        ({"plugins": [{"path": "tests"}]}, r"plugins\[0\] must have the key `use: package.module:Name`"),
        ({"plugins": [{"use": "forge_weaver:Distild", "path": "x"}]}, r"plugins\[0\].use: .*Distild' was not found"),
        ({"plugins": [{"use": "forge_weaver:Distilled"}]}, r"plugins\[0\].path' must be set"),
        ({"plugins": [{"use": "forge_sandbox:CodeVerifier", "credit": "some"}]}, r"plugins\[0\].credit: .*'all' or"),
        ({"plugins": [{"use": "forge_sandbox:CodeVerifier", "sandbox": {"memry_mb": 1}}]}, "did you mean 'memory_mb'"),
        ({"judges": [{**JUDGE, "votes": 0}]}, r"judges\[0\].votes must be at least 1, got 0"),
        ({"judges": [{**JUDGE, "api_key_env": "NO_SUCH_KEY"}]}, "the environment has no NO_SUCH_KEY"),
        ({"reward_model": []}, "did you mean 'reward_models'"),
        ({"judges": [{"url": "x"}]}, r"'judges\[0\].model' must be set"),
        ({"judges": [{**JUDGE, "vote": 3}]}, r"unknown key 'judges\[0\].vote'; did you mean 'votes'"),
        ({"judges": {}}, "must be a list"),
        ({"reward_models": [{"path": "a/b", "dtype": "int4"}]}, "must be one of float32"),
    ],
)
def test_invalid_verifier_settings_raise_before_opening(changed, message):
    with pytest.raises(ConfigError, match=message):
        build(VerifiersConfig, changed).check_sources()
