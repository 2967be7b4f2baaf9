"""What a run knows of its data before its first process: lengths, rows that are in both sets, the last step."""

import json

import pytest

from forge.config import ConfigError, build
from forge.data.config import DatasetConfig, PreferencesConfig, SupervisedConfig
from forge.models import build_small_model
from forge.recipes.prepare import check_data, prepare_run
from forge.recipes.resume import Start
from forge.recipes.rl_config import RLConfig
from forge.recipes.schema import EvalConfig, RunConfig
from forge.recipes.sft import SFTConfig

SHAPE = {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "max_positions": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_small_model(tmp_path_factory.mktemp("small") / "model", seed=0, alphabet="0123456789+=", **SHAPE)


def sums(*numbers):
    return [{"question": f"{number}+1=", "answer": str(number + 1)} for number in numbers]


def rl(model, rows=({"question": "1+1=", "answer": "2"},), **sections):
    from forge.data.files import Rows

    dataset = {"path": Rows(rows)} | sections.pop("dataset", {})
    return build(RLConfig, {"model": str(model), "dataset": dataset, "eval": {"problems": 0}, **sections})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"grpo": {"max_tokens": 100}}, "grpo.max_tokens = 100 leaves no room for a prompt in the 32 tokens"),
        ({"grpo": {"max_tokens": 32}}, "grpo.max_tokens = 32 leaves no room"),
        (
            {"grpo": {"max_tokens": 8}, "generator": {"max_seq_len": 8}},
            "in the 8 tokens that generators take: lower it, or raise generator.max_seq_len",
        ),
        (
            {"grpo": {"max_tokens": 20}, "dataset": {"max_prompt_tokens": 13}},
            "dataset.max_prompt_tokens is more than the 12 tokens that grpo.max_tokens = 20 leaves of the 32",
        ),
        (
            {"grpo": {"max_tokens": 20}, "dataset": {"max_prompt_tokens": 40}},
            "dataset.max_prompt_tokens is more than the 12 tokens",
        ),
    ],
)
def test_oversized_max_tokens_raises_before_start(model, sections, message):
    with pytest.raises(ConfigError, match=message) as caught:
        rl(model, **sections).data(str(model))
    assert "\n" not in str(caught.value)


def test_oversized_prompts_are_skipped_with_row_number(model, caplog):
    rows = [*sums(1, 2), {"question": "1+" * 30 + "=", "answer": "30"}]
    cfg = rl(model, rows, grpo={"max_tokens": 4})
    check_data(cfg.data(str(model)), cfg.eval, str(model), 0)
    assert "1 of 3 prompts are skipped because they are longer than max_prompt_tokens=28 (first: row 3)" in caplog.text
    cfg = rl(model, rows[2:], grpo={"max_tokens": 4})
    with pytest.raises(ValueError, match="all 1 prompts are longer than max_prompt_tokens=28"):
        check_data(cfg.data(str(model)), cfg.eval, str(model), 0)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({}, True),
        ({"reward": {"functions": ["ExactMatch"]}}, False),
        ({"reward": {"functions": [lambda prompt, response, target: 1.0]}}, False),
        ({"reward": {"accuracy": "ExactMatch"}}, True),
        ({"environment": lambda: None}, False),
    ],
)
def test_config_without_reward_raises(model, caplog, sections, told):
    rl(model, **sections).check_reward()
    assert ("reward is not set: MathReward scores responses" in caplog.text) == told


@pytest.mark.parametrize(
    ("evaluation", "said"),
    [
        ({"problems": 0, "every": 2}, True),
        ({"problems": 0, "every": 1}, True),
        ({"problems": 0}, False),
        ({"problems": 1, "every": 2}, False),
        ({"problems": 1}, False),
    ],
)
@pytest.mark.parametrize("config", [RLConfig, SFTConfig])
def test_evaluation_without_problems_raises_one_line_error(model, tmp_path, caplog, config, evaluation, said):
    for name, chosen in (("rows", sums(1, 2, 3)), ("test", sums(4))):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, chosen)))
    evaluation = {**evaluation, **({"path": str(tmp_path / "test.jsonl")} if evaluation["problems"] else {})}
    values = {"model": str(model), "dataset": {"path": str(tmp_path / "rows.jsonl")}, "eval": evaluation}
    values["run"] = {"name": "x", "root": str(tmp_path / "runs")}
    *_, record = prepare_run(build(config, values), Start())
    record.close()
    assert ("have no effect in this configuration: eval.every" in caplog.text) == said


@pytest.mark.parametrize(
    ("config", "row"),
    [
        (DatasetConfig, lambda n: {"question": f"{n}+1=", "answer": n + 1}),
        (SupervisedConfig, lambda n: {"question": f"{n}+1=", "answer": n + 1}),
        (PreferencesConfig, lambda n: {"prompt": f"{n}+1=", "chosen": n + 1, "rejected": n}),
    ],
)
@pytest.mark.parametrize(("numbers", "known"), [(range(4), 4), ([2, 3, 8, 9], 2), ([7, 8, 9, 5], 0)])
def test_held_out_rows_in_training_data_warn(model, tmp_path, caplog, config, row, numbers, known):
    for name, chosen in (("train", range(4)), ("test", numbers)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(row(number)) for number in chosen))
    evaluation = EvalConfig(path=str(tmp_path / "test.jsonl"), problems=4)
    check_data(config(path=str(tmp_path / "train.jsonl")), evaluation, str(model), 0)
    assert (f"{known} of the 4 held-out" in caplog.text) == (known > 0)
    assert caplog.text.count("held-out") == (known > 0)


@pytest.mark.parametrize("name", ["", ".", "..", "a/../../b"])
def test_invalid_run_name_raises(name: str):
    with pytest.raises(ConfigError, match=r"run\.name is '.*': it names a folder within run\.root"):
        RunConfig(name=name)
