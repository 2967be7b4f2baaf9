"""Settings of TRL, verl, OpenRLHF, torchforge and TitanRL are answered by what stands for them here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from forge.recipes.foreign import check_sampling

import forge
from forge.algorithms import ALGORITHMS, setting_names
from forge.config import ConfigError, build, keys_of, load, section_in
from forge.recipes.dpo import DPOConfig
from forge.recipes.rl_config import RLConfig
from forge.recipes.sft import SFTConfig
from forge.runtime.controller import Options
from forge_compat.setting_names import GUIDES, TABLES, answer, translated

ROOT = Path(__file__).parents[2]
ROWS = [{"question": "abc", "answer": "cba"}]
START = {"from_scratch": {"alphabet": "abc>"}, "dataset": ROWS, "reward": "ExactMatch"}
NAMES = [(library, name, here) for library, table in TABLES.items() for name, here in table.items()]
# Arguments of forge.train that are no keys of the configuration.
ARGUMENTS = {"dataset", "reward", "model", "seed"}


def has_key(path: str) -> bool:
    """Whether a recipe has this key, or the algorithm has this setting."""
    for config in (RLConfig, SFTConfig, DPOConfig):
        section: Any = config
        for name in path.split("."):
            keys = keys_of(section) if section is not None else {}
            if name not in keys:
                break
            section = section_in(keys[name].annotation)
        else:
            return True
    section_name, _, name = path.partition(".")
    return section_name == "grpo" and any(name in setting_names(algorithm) for algorithm in ALGORITHMS)


def test_there_are_at_least_sixty_names_of_four_libraries():
    counts = {library: len(table) for library, table in TABLES.items()}
    assert sum(counts.values()) >= 60
    assert {"TRL", "verl", "OpenRLHF", "torchforge"} <= {library for library, count in counts.items() if count >= 10}


@pytest.mark.parametrize(("library", "name", "here"), NAMES, ids=[f"{library}-{name}" for library, name, _ in NAMES])
def test_every_answer_is_a_key_that_exists_or_a_sentence(library: str, name: str, here: str):
    if " " not in here:
        path = here.split("=")[0]
        assert path in ARGUMENTS or has_key(path), path
    # Every key in a sentence exists as well.
    for path in re.findall(
        r"\b(?:grpo|training|generator|services|checkpoint|eval|dataset|reward|metrics)\.[a-z_.]+\b", here
    ):
        if " " in here and not path.endswith(".md"):
            assert has_key(path) or path.startswith("services."), path
    assert answer(name) is not None


@pytest.mark.parametrize(("library", "name", "here"), NAMES, ids=[f"{library}-{name}" for library, name, _ in NAMES])
def test_every_name_is_answered_where_it_is_typed(library: str, name: str, here: str):
    """In Python and in a file, by one line that has the answer; a name that a library shares may be answered as
    another's."""
    value: Any = 8
    for key in reversed(name.split(".")[1:]):
        value = {key: value}
    top = name.split(".")[0]
    answered = here.split("=")[0].rpartition(".")[2] if " " not in here else here
    other = answer(name)
    assert other is not None
    expected = answered if other[1] == here else other[1].split("=")[0].rpartition(".")[2]
    if top in keys_of(RLConfig):  # a key of ours as well, such as async
        return
    for typed in (
        lambda: forge.train(None, steps=1, **START, **{top: value}),
        lambda: build(RLConfig, {"from_scratch": {}, "dataset": {"task": "apps.toys.numbers:Add"}, top: value}),
    ):
        with pytest.raises(ConfigError) as caught:
            typed()
        assert expected in str(caught.value), str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_file_of_another_library_is_answered_whole(tmp_path: Path):
    file = tmp_path / "upstream.yaml"
    file.write_text(
        "group_size: 8\nlocal_batch_size: 4\nmax_req_tokens: 512\noff_by_n: 1\n"
        "policy: {engine_args: {tensor_parallel_size: 1}}\ndataset: {path: x, revision: main}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(RLConfig, ["--config", str(file)])
    message = str(caught.value)
    for name, here in (
        ("group_size", "grpo.n_samples"),
        ("off_by_n", "async.max_policy_age"),
        ("revision", "dataset.subset"),
    ):
        assert name in message
        assert here in message
    assert "docs/howto/from_torchforge.md" in message
    with pytest.raises(ConfigError, match=r"verl's actor_rollout_ref.rollout.n is grpo.n_samples here"):
        load(RLConfig, ["--config", str(ROOT / "apps/grpo/tiny.yaml"), "--actor_rollout_ref.rollout.n", "8"])
    with pytest.raises(
        ConfigError, match=r"unknown key 'trainer.save_freq': verl's trainer.save_freq is checkpoint.every"
    ):
        load(RLConfig, ["--config", str(ROOT / "apps/grpo/tiny.yaml"), "--trainer.save_freq", "8"])


@pytest.mark.parametrize(
    ("call", "settings", "message"),
    [
        (forge.train, {"num_generations": 8}, r"TRL's num_generations is n_samples \(grpo.n_samples in YAML\) here"),
        (forge.train, {"grpo": {"num_generations": 8}}, "'num_generations': TRL's num_generations is grpo.n_samples"),
        (forge.train, {"rollout": {"num_generations": 8}}, "TRL's num_generations is grpo.n_samples here"),
        (
            forge.train,
            {"training": {"lr": 1e-5}},
            "unknown key 'training.lr': TRL's training.lr is training.learning_rate",
        ),
        (forge.train, {"epsilon": 0.2}, "epsilon = 0.2 is Adam's here: TRL's epsilon is clip_low"),
        (forge.train, {"epochs": 3}, "epochs are passes over each batch here"),
        (forge.train, {"num_generations": 8, "use_vllm": True}, r"n_samples .*; TRL's use_vllm is engine=vllm"),
        (forge.sft, {"max_seq_length": 64}, r"TRL's max_seq_length is max_tokens \(dataset.max_tokens in YAML\)"),
        (forge.dpo, {"max_length": 64}, "TRL's max_length is max_tokens"),
        (forge.dpo, {"save_steps": 64}, r"TRL's save_steps is every \(checkpoint.every in YAML\)"),
    ],
)
def test_other_places_where_a_name_is_typed(call: Any, settings: dict[str, Any], message: str):
    given = START if call is forge.train else {"from_scratch": {}, "dataset": ROWS}
    with pytest.raises(ConfigError, match=message):
        call(None, **given, **settings)


def test_names_without_what_is_required_are_answered_too():
    with pytest.raises(ConfigError, match="TRL's train_dataset is dataset here; TRL's reward_funcs is reward here"):
        forge.train("model", train_dataset=ROWS, reward_funcs=[len])


def test_sampling_has_names_of_its_own():
    with pytest.raises(ConfigError, match="TRL's max_new_tokens is max_tokens"):
        check_sampling({"max_new_tokens": 8})
    with pytest.raises(ConfigError, match="unknown setting 'temprature'; did you mean 'temperature'"):
        forge.generate("model", "hi", temprature=0.5)
    with pytest.raises(ConfigError, match="max_new_tokens"):
        forge.evaluate("model", dataset=ROWS, reward=len, max_new_tokens=5)


def test_a_name_of_our_own_is_no_other_librarys():
    assert translated(["n_samples", "learning_rate", "beta"]) == ""
    for name in ("beta", "temperature", "top_p", "seed", "gradient_checkpointing"):
        assert answer(name) is None


def test_every_guide_exists():
    for library, guide in GUIDES.items():
        assert (ROOT / guide).is_file(), (library, guide)


SECTIONS = {
    "grpo",
    "training",
    "dataset",
    "generator",
    "services",
    "checkpoint",
    "eval",
    "run",
    "reward",
    "metrics",
    "async",
    "parallelism",
    "lora",
    "episode",
}


@pytest.mark.parametrize("guide", sorted({*GUIDES.values()}))
def test_every_key_of_a_guides_tables_exists(guide: str):
    rows = re.findall(r"^\|(?! *-)(.*)\|(.*)\|$", (ROOT / guide).read_text(), re.MULTILINE)
    assert len(rows) >= 20
    for _, here in rows:
        for code in re.findall(r"`([^`]*)`", here):
            path = re.split(r"[:= {]", code)[0]
            if path.partition(".")[0] in SECTIONS and "." in path and "*" not in path and "NAME" not in path:
                assert has_key(path), (guide, path)


@pytest.mark.parametrize("guide", sorted({*GUIDES.values()}))
def test_names_of_a_guides_tables_are_ours_or_answered(guide: str):
    """Settings in the left column of the tables of settings: each is a key of ours as well, or the error answers it."""
    text = (ROOT / guide).read_text()
    table = re.search(r"## (?:Settings|Configuration)\n(.*?)(?=\n## |\Z)", text, re.DOTALL)
    rows = re.findall(r"^\|(?! *-)(.*?)\|.*\|$", table[1] if table else "", re.MULTILINE)
    unanswered = []
    for cell in rows:
        for code in re.findall(r"`([^`]*)`", cell):
            name = re.split(r"[:= {\[(]", code)[0].strip("-")
            ours = any(name.rpartition(".")[2] in keys_in(config) for config in (RLConfig, SFTConfig, DPOConfig))
            # Words without either are mostly values.
            is_setting = re.fullmatch(r"[a-z_.0-9]+", name) and re.search(r"[_.]", name)
            if is_setting and answer(name) is None and not ours:
                unanswered.append(name)
    assert unanswered == []


def keys_in(config: Any) -> set[str]:
    """All keys of a configuration, with those of its sections and algorithms."""
    names = {name for algorithm in ALGORITHMS for name in setting_names(algorithm)}
    # Of services, an argument of forge.train, and the value of a setting that looks like one.
    names |= {*Options.model_fields, "eval_dataset", "reinforce_plus_plus"}
    for name, field in keys_of(config).items():
        section = section_in(field.annotation)
        names |= {name, *(keys_of(section) if section is not None else ())}
    return names
