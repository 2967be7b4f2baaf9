"""`rollout:` and `algorithm:` in place of `grpo:`: the same configuration."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from forge.config import ConfigError, build, load, to_dict
from forge.recipes.rl_config import RLConfig

BASE = {"model": "a model", "dataset": {"task": "apps.toys.words:Reverse", "prompt_template": "{question}>"}}
ONE = {"algorithm": "dapo", "grpo": {"n_samples": 4, "max_tokens": 64, "clip_high": 0.3, "temperature": 0.7}}
TWO = {
    "algorithm": {"name": "dapo", "clip_high": 0.3},
    "rollout": {"n_samples": 4, "max_tokens": 64, "temperature": 0.7},
}


def read(path: Path, values: dict[str, Any], *overrides: str) -> dict[str, Any]:
    path.write_text(yaml.safe_dump({**BASE, **values}))
    return to_dict(load(RLConfig, ["--config", str(path), *overrides]))


def test_two_sections_are_one(tmp_path: Path):
    both = read(tmp_path / "two.yaml", TWO)
    assert both == read(tmp_path / "one.yaml", ONE) == to_dict(build(RLConfig, {**BASE, **TWO}))
    assert both["algorithm"] == "dapo"
    assert both["grpo"]["clip_high"] == 0.3
    assert to_dict(build(RLConfig, both)) == both


@pytest.mark.parametrize("form", [ONE, TWO])
def test_overrides_win_by_either_name(tmp_path: Path, form: dict[str, Any]):
    words = ["--rollout.n_samples", "6", "--algorithm.clip_high", "0.4", "--algorithm.name", "cispo"]
    changed = read(tmp_path / "run.yaml", form, *words)
    assert changed == read(
        tmp_path / "run.yaml", form, "--grpo.n_samples", "6", "--grpo.clip_high", "0.4", "--algorithm", "cispo"
    )
    assert (changed["grpo"]["n_samples"], changed["grpo"]["clip_high"], changed["algorithm"]) == (6, 0.4, "cispo")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rollout": {"clip_high": 0.3}}, "unknown key 'rollout.clip_high'"),
        (
            {"rollout": {"n_sample": 3}},
            "unknown key 'rollout.n_sample'; did you mean 'n_samples'?; settings of the loss",
        ),
        ({"rollout": [3]}, "rollout must be a mapping of keys to values, got [3]"),
        ({"rollout": {"n_samples": 3}, "grpo": 3}, "grpo must be a mapping of keys to values, got 3"),
        ({"algorithm": {"n_samples": 3}}, "algorithm.n_samples is a key of rollout: write it there"),
        (
            {"rollout": {"n_samples": 3}, "grpo": {"n_samples": 4}},
            "grpo.n_samples and rollout.n_samples are the same setting: keep one",
        ),
        (
            {"algorithm": {"name": "dapo", "clip": 0.3}, "rollout": {}},
            "dapo has no setting 'clip'",
        ),
        ({"rollout": 3}, "rollout must be a mapping of keys to values, got 3"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, values: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as error:
        read(tmp_path / "run.yaml", values)
    assert message in str(error.value)


def test_a_section_that_is_overridden_as_a_whole_overrides_its_keys(tmp_path: Path):
    words = ["--rollout", "{n_samples: 6}", "--algorithm", "{name: cispo, clip_high: 0.4}"]
    for form in (ONE, TWO):
        changed = read(tmp_path / "run.yaml", form, *words)
        assert (changed["grpo"]["n_samples"], changed["grpo"]["max_tokens"]) == (6, 64)
        assert (changed["grpo"]["clip_high"], changed["algorithm"]) == (0.4, "cispo")


def test_a_section_that_is_null_is_empty(tmp_path: Path):
    plain = read(tmp_path / "run.yaml", {})
    assert read(tmp_path / "run.yaml", {"rollout": None}) == plain
    assert read(tmp_path / "run.yaml", {"algorithm": {"name": None}}) == plain
