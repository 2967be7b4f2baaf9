"""Typical mistakes of a first week, each answered by one line that says what to type."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import forge
from forge.cli import main
from forge.config import load
from forge.envs.group import MAX_UNSCORED_GROUPS, SingleTurnEnv
from forge.recipes.rl_config import RLConfig
from forge.rewards.reward import Reward
from forge.types import Completion, Prompt, Sample

ROWS = [{"question": word, "answer": word[::-1]} for word in ("abc", "cab", "bca", "acb")]
START: dict[str, Any] = {
    "from_scratch": {"alphabet": "abc>", "max_positions": 32},
    "dataset": ROWS,
    "reward": "CharacterMatch",
    "steps": 2,
    "batch_size": 2,
    "n_samples": 2,
    "max_tokens": 4,
    "seq_len": 64,
    "services": {"reward": None},
}


def started(settings: dict[str, Any]) -> None:
    """`forge.train` with these settings; None removes a key of START."""
    given = {name: value for name, value in (START | settings).items() if value is not None}
    forge.train(given.pop("model", None), **given)


TALK = [{"role": "user", "content": "abc"}]
# What was done, its settings, and the words that the line has to have.
TABLE: list[tuple[str, dict[str, Any], str]] = [
    ("a misspelt key", {"learning_rat": 1.0}, "unknown setting 'learning_rat'; did you mean 'learning_rate'"),
    ("a name of TRL", {"num_generations": 8}, r"num_generations is n_samples \(grpo.n_samples in YAML\)"),
    (
        "several names of TRL and one that nobody has",
        {"num_generations": 8, "lerning_rate": 1.0, "peft_config": {"r": 16}, "eval_steps": 5},
        r"did you mean 'learning_rate'\?; TRL's num_generations .* TRL's peft_config is lora .* is eval=\{'every': \.",
    ),
    ("epochs for passes over the data", {"epochs": 3}, "epochs are passes over each batch here"),
    ("TRL's epsilon", {"epsilon": 0.2}, "TRL's epsilon is clip_low"),
    ("a key of two sections", {"dtype": "bfloat16"}, r"write training=\{'dtype': ...\} or generator="),
    ("text for a number", {"steps": "many"}, "training.steps must be a whole number, got 'many'"),
    ("a number in quotes", {"learning_rate": "1e-5"}, "training.learning_rate must be a number, got '1e-5'"),
    ("a negative rate", {"learning_rate": -1.0}, "training.learning_rate must be at least 0"),
    ("a misspelt algorithm", {"algorithm": "gpro"}, "unknown algorithm 'gpro': did you mean 'gspo'"),
    ("one sample of a prompt", {"n_samples": 1}, "grpo.n_samples must be at least 2"),
    ("a missing file", {"dataset": "nope.jsonl"}, r"no such file: nope.jsonl \(in "),
    (
        "a wrong column",
        {"prompt_field": "qesion"},
        "no field 'qesion': the row has question, answer; did you mean 'question'",
    ),
    (
        "no target",
        {"dataset": [{"question": "abc"}]},
        "no field 'answer': the row has question; set target_field to null",
    ),
    (
        "a column that a reward wants",
        {"reward": lambda response, level: 0.0},
        "row 1: the reward has a parameter 'level', but",
    ),
    ("a generator as data", {"dataset": (row for row in ROWS)}, "the rows have no length .*: pass a list"),
    ("texts as rows", {"dataset": ["abc", "cab"]}, "row 1 is 'abc', but a row must be a mapping: pass"),
    ("no rows", {"dataset": []}, "the dataset is empty: it has no rows"),
    (
        "a chat without a template",
        {"chat_template": True},
        "the tokenizer has no chat template: use a chat model",
    ),
    ("messages without a template", {"dataset": [{"prompt": TALK, "answer": "a"}]}, "row 1: the tokenizer has no chat"),
    (
        "texts for messages",
        {"dataset": [{"prompt": ["abc"], "answer": "a"}]},
        r"must be a message \{role, content\}, not str",
    ),
    (
        "a prompt longer than the model",
        {"dataset": [{"question": "abc" * 20, "answer": "a"}]},
        "longer than max_prompt_tokens",
    ),
    ("answers longer than seq_len", {"max_tokens": 100}, "training.seq_len must exceed grpo.max_tokens"),
    (
        "a reward that names nothing",
        {"reward": lambda answer: 0.0},
        "has no parameter for the response: name its parameters prompt",
    ),
    ("weights for other rewards", {"reward_weights": [1.0, 0.5]}, "reward.weights has 2 entries for 1 functions"),
    ("a reward that is a number", {"reward": 1.0}, "a reward must be a function"),
    ("a model that is not there", {"model": "./no/model", "from_scratch": None}, "no/model"),
    (
        "a GPU that is not there",
        {"services": {"generator": {"num_replicas": 999, "with_gpus": True}}},
        "GPUs are needed .* set with_gpus to false",
    ),
    ("resume without checkpoints", {"resume": "auto"}, "needs checkpoint.every"),
    (
        "resume of another run",
        {"resume": "runs/b", "name": "a", "checkpoint": {"every": 1}},
        "runs/b is another directory than runs/a",
    ),
    ("a root that is a file", {"run": {"root": __file__}}, "set run.root to a writable directory"),
    (
        "evaluation data that is a task",
        {"eval_dataset": "apps.toys.words:Sort"},
        "eval_dataset must be rows or the path",
    ),
]


@pytest.mark.parametrize(("settings", "words"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_common_config_mistakes_raise_one_line_error_before_start(
    settings: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError), match=words) as caught:
        started(settings)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").glob("*/metrics.jsonl"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("training:\n\tsteps: 3\n", "bad.yaml"),
        ("training:\n  steps: 3\n   batch_size: 4\n", "bad.yaml"),
        ("dataset: {path: x}\ntraining: [steps]\n", "training must be a mapping of keys to values"),
    ],
    ids=["a tab", "indentation", "a list"],
)
def test_invalid_config_file_raises_one_line_error(text: str, words: str, tmp_path: Path):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        load(RLConfig, ["--config", str(file)])
    assert "\n" not in str(caught.value).strip()


@pytest.mark.parametrize(
    ("function", "reason"),
    [(lambda response: None, "gave None"), (lambda response: float("nan"), "gave nan")],
    ids=["None", "nan"],
)
def test_reward_that_never_scores_is_reported_with_example_input(function: Callable[..., Any], reason: str):
    reward = Reward([function], names=["mine"])

    async def generate(prompt: Prompt, **sampling: Any) -> list[Completion]:
        return [Completion("cb", [3, 4], [-1.0, -1.0], finish="stop")] * 2

    async def score(prompt: Prompt, texts: list[str], target: str, evaluation: bool, completions: Any) -> Any:
        return await reward.score(prompt, texts, target, completions)

    policy = SimpleNamespace(generate=SimpleNamespace(route=generate))
    env = SingleTurnEnv(SimpleNamespace(score=SimpleNamespace(route=score)))

    async def work() -> None:
        for _ in range(MAX_UNSCORED_GROUPS):
            await env.rollout(policy, Sample(Prompt("abc>", (1,)), "cba"), n=2)

    with pytest.raises(RuntimeError, match=f"could be scored.*mine: it {reason}.*prompt 'abc>', response 'cb'"):
        asyncio.run(work())


def test_misspelt_forge_command_error_lists_commands(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["trian"])
    assert "train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dataset": [{"question": "xyz", "answer": "zyx"}]}, "encodes as unknown"),
        ({"reward": None}, "reward is not set: MathReward scores responses"),
        ({"eval": {"every": 2}}, "have no effect in this configuration: eval.every"),
        ({"eval_dataset": ROWS}, "4 of the 4 held-out prompts are also in the training data"),
    ],
    ids=["letters outside the alphabet", "no reward", "evaluation without data", "evaluation on the training data"],
)
def test_unusual_config_settings_log_a_warning(
    settings: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("forge"), "propagate", True)

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    # The last check before the first thing is written.
    monkeypatch.setattr("forge.recipes.prepare.check_space", stop)
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
        started(settings)
    assert words in caplog.text
