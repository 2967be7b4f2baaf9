"""What a run knows of its data before its first process: lengths, rows that are in both sets, the last step."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from forge.config import ConfigError, build, to_dict
from forge.data.config import DatasetConfig, PreferencesConfig, SupervisedConfig
from forge.models import build_small_model
from forge.recipes.distill import DistillConfig
from forge.recipes.prepare import check_data, prepare
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
def test_completions_that_no_generator_has_room_for(model, sections, message):
    with pytest.raises(ConfigError, match=message) as caught:
        rl(model, **sections).data(str(model))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "longest"),
    [
        ({"grpo": {"max_tokens": 20}}, 12),
        ({"grpo": {"max_tokens": 20}, "dataset": {"max_prompt_tokens": 5}}, 5),
        ({"grpo": {"max_tokens": 20}, "dataset": {"max_prompt_tokens": 12}}, 12),
        ({"grpo": {"max_tokens": 4}, "generator": {"max_seq_len": 16}}, 12),
        ({"grpo": {"max_tokens": 4}, "training": {"seq_len": 10}}, 6),
        ({}, 31),  # the default of max_tokens is too much: answers end at the model's length
    ],
)
def test_prompts_have_what_completions_leave_of_the_model(model, sections, longest):
    cfg = rl(model, **sections)
    before = to_dict(cfg)
    assert cfg.data(str(model)).max_prompt_tokens == longest
    assert to_dict(cfg) == before  # a resumed run is compared with it


def test_a_prompt_that_no_generator_has_room_for_is_known_with_its_row(model, caplog):
    rows = [*sums(1, 2), {"question": "1+" * 30 + "=", "answer": "30"}]
    cfg = rl(model, rows, grpo={"max_tokens": 4})
    check_data(cfg.data(str(model)), cfg.eval, str(model), 0)
    assert "1 of 3 prompts are left out, for they are longer than max_prompt_tokens=28 (first: row 3)" in caplog.text
    cfg = rl(model, rows[2:], grpo={"max_tokens": 4})
    with pytest.raises(ValueError, match="all of 1 prompts are longer than max_prompt_tokens=28"):
        check_data(cfg.data(str(model)), cfg.eval, str(model), 0)


def test_distillation_has_the_same_bound(model):
    settings = {"model": str(model), "dataset": {"task": "apps.toys.numbers:Add"}}
    cfg = build(DistillConfig, {**settings, "distill": {"teacher": str(model), "max_tokens": 20}})
    assert cfg.data(str(model)).max_prompt_tokens == 12
    cfg = build(DistillConfig, {**settings, "distill": {"teacher": str(model), "max_tokens": 33}})
    with pytest.raises(ConfigError, match=r"distill.max_tokens = 33 leaves no room"):
        cfg.data(str(model))


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
def test_a_reward_that_nobody_set_is_told(model, caplog, sections, told):
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
def test_an_evaluation_without_problems_is_one_line(model, tmp_path, caplog, config, evaluation, said):
    for name, chosen in (("rows", sums(1, 2, 3)), ("test", sums(4))):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, chosen)))
    evaluation = {**evaluation, **({"path": str(tmp_path / "test.jsonl")} if evaluation["problems"] else {})}
    values = {"model": str(model), "dataset": {"path": str(tmp_path / "rows.jsonl")}, "eval": evaluation}
    values["run"] = {"name": "x", "root": str(tmp_path / "runs")}
    *_, record = prepare(build(config, values), Start())
    record.close()
    assert ("read by nothing in this configuration: eval.every" in caplog.text) == said


@pytest.mark.parametrize(
    ("config", "row"),
    [
        (DatasetConfig, lambda n: {"question": f"{n}+1=", "answer": n + 1}),
        (SupervisedConfig, lambda n: {"question": f"{n}+1=", "answer": n + 1}),
        (PreferencesConfig, lambda n: {"prompt": f"{n}+1=", "chosen": n + 1, "rejected": n}),
    ],
)
@pytest.mark.parametrize(("numbers", "known"), [(range(4), 4), ([2, 3, 8, 9], 2), ([7, 8, 9, 5], 0)])
def test_rows_of_the_evaluation_that_are_trained_are_told(model, tmp_path, caplog, config, row, numbers, known):
    for name, chosen in (("train", range(4)), ("test", numbers)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(row(number)) for number in chosen))
    evaluation = EvalConfig(path=str(tmp_path / "test.jsonl"), problems=4)
    check_data(config(path=str(tmp_path / "train.jsonl")), evaluation, str(model), 0)
    assert (f"{known} of the 4 held-out" in caplog.text) == (known > 0)
    assert caplog.text.count("held-out") == (known > 0)


def test_epochs_of_a_stream_have_no_known_end(model, tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, sums(1, 2, 3))))
    data = SupervisedConfig(path=str(tmp_path / "rows.jsonl"), streaming=True, epochs=2)
    with pytest.raises(ValueError, match=r"dataset\.epochs needs data of a known length"):
        check_data(data, EvalConfig(problems=0), str(model), 0)


RUN = """
import forge
more = {"from_scratch": {"alphabet": "0123456789+=", "hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1},
        "batch_size": 4, "steps": 50, "checkpoint": {"every": 2}, "seq_len": 256}
for resume in (None, "auto"):
    forge.sft(None, dataset={"path": "rows.jsonl", "epochs": 1}, eval_dataset="test.jsonl", name="sft", resume=resume,
              eval={"accuracy": False, "problems": 1}, **more)
forge.dpo(None, dataset={"path": "pairs.jsonl", "epochs": 2}, name="dpo", **more)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_ends_with_its_epochs_and_has_its_model(tmp_path):
    pairs = [{"prompt": f"{n}+1=", "chosen": n + 1, "rejected": n} for n in range(6)]
    for name, rows in (("rows", sums(*range(10))), ("test", sums(11)), ("pairs", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "script.py").write_text(RUN)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "the data ends after its epochs, 10 rows or 3 steps of 4: so does the run" in said
    assert "runs/sft is finished: it ended after step 3" in said  # the second time
    for name in ("sft", "dpo"):  # of 10 rows, and of 2 times 6 pairs
        folder = tmp_path / "runs" / name
        logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert logged[-1]["step"] == 3
        assert name == "dpo" or "eval/loss" in logged[-1]
        ends = ("model/model.safetensors", "checkpoints/step_000003", "report.html", "finished")
        assert [end for end in ends if not (folder / end).exists()] == []


@pytest.mark.parametrize("name", ["", ".", "..", "a/../../b"])
def test_a_name_is_that_of_a_folder_of_its_own(name: str):
    with pytest.raises(ConfigError, match=r"run\.name is '.*': it names a folder within run\.root"):
        RunConfig(name=name)
