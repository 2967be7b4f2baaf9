"""Overrides of a command line: text stays text, whatever YAML makes of it; and files in other encodings."""

import pytest

from forge.config import ConfigError, load
from forge.recipes.rl_config import RLConfig


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: some/model\ndataset: {path: openai/gsm8k}\n")
    return path


def read(path, *overrides):
    return load(RLConfig, ["--config", str(path), *overrides])


@pytest.mark.parametrize(
    "text",
    [
        "Q: {question}\nA:",
        "{question}: ",
        "[{question}]",
        "- {question}",
        "{question}\n\n  so\n",
        "! {question}",
        "{question} | yes",
        " {question}",
        "2026-11-26 {question}",
        "a: {question}",
        "*{question}*",
        "{question} # so: [x]",
    ],
)
@pytest.mark.parametrize("key", ["dataset.prompt_template", "dataset.system_prompt"])
def test_text_setting_overrides_are_taken_verbatim(config, key, text):
    more = ("--dataset.chat_template", "true") if key == "dataset.system_prompt" else ()
    assert read(config, f"--{key}", text, *more).dataset[key.partition(".")[2]] == text


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("run.name", "'quoted'", "quoted"),
        ("dataset.system_prompt", "null", None),
        ("dataset.target_field", "null", None),
        ("dataset.target_field", "1", "1"),
        ("run.save_before", "3600", 3600.0),
        ("dataset.choices_field", "[a, b]", ["a", "b"]),
        ("grpo.correction", "none", "none"),
        ("grpo.reference", "12", "12"),
        ("training.learning_rate", "1", 1.0),
    ],
)
def test_command_line_overrides_are_parsed_to_setting_type(config, key, text, value):
    more = {
        "run.save_before": ("--checkpoint.every", "1"),
        "dataset.choices_field": ("--dataset.prompt_template", "{question} {choices}"),
        "dataset.system_prompt": ("--dataset.chat_template", "true"),
        "grpo.reference": ("--grpo.beta", "0.1"),
    }
    section, name = key.split(".")
    found = read(config, f"--{key}", text, *more.get(key, ()))[section][name]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(("key", "text"), [("seed", "one"), ("training.steps", "1.5"), ("eval", "yes")])
def test_command_line_overrides_of_wrong_type_raise(config, key, text):
    with pytest.raises(ConfigError, match=f"{key} must be"):
        read(config, f"--{key}", text)


@pytest.mark.parametrize(("encoding", "fault"), [("latin-1", "byte 0xf6 is not UTF-8"), ("utf-16", "is in UTF-16")])
def test_utf16_config_raises_one_line_error(config, encoding, fault):
    config.write_text(config.read_text() + "\n# größer", encoding=encoding)
    with pytest.raises(ConfigError, match=rf"run.yaml, line \d+: .*{fault}"):
        read(config)
