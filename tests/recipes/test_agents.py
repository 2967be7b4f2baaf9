"""The recipes of agents as a user runs them, with small models that know nothing yet."""

import json
import sys

import pytest
import yaml

from apps.code.config import CodeConfig
from apps.code.demonstrate import body
from apps.tools.demonstrate import conversation
from apps.tools.main import ToolsConfig, calc
from apps.toys import programs
from apps.toys.expressions import Expression
from forge.config import ConfigError, load
from forge.recipes.launch import launch
from forge.recipes.result import Result
from forge_envs import ToolError
from tests.recipes.test_recipes import run_here

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '>' }}{% endfor %}"


def config(folder, task, **more):
    path = folder / "run.yaml"
    settings = {
        "from_scratch": {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "max_positions": 128},
        "run": {"name": "run", "root": str(folder)},
        "dataset": {"task": task, "difficulty": [2, 2]},
        "episode": {"max_turns": 3, "max_tokens": 96, "template": TEMPLATE},
        "training": {"batch_size": 2, "steps": 2, "learning_rate": 1e-3, "seq_len": 256},
        "grpo": {"n_samples": 3, "max_tokens": 8},
        "eval": {"problems": 4},
        **more,
    }
    path.write_text(yaml.safe_dump(settings))
    return str(path)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("app", "task"),
    [
        pytest.param("tools", "apps.toys.expressions:Expression", marks=pytest.mark.full),
        ("code", "apps.toys.programs:Program"),
    ],
)
def test_tools_and_code_recipes_complete_and_record_metrics(tmp_path, app, task):
    run_here(sys.executable, "-m", f"apps.{app}.main", "--config", config(tmp_path, task))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert 0 <= rows[0]["eval/accuracy"] <= 1
    assert rows[0]["eval/unscored"] == 0
    played = [row for row in rows if "episode/turns" in row]
    assert played
    assert all(1 <= row["episode/turns"] <= 3 for row in played)
    sampled = [row for row in rows if "episode/unscored" in row]  # where episodes ended during the step
    assert sampled
    assert all(row["episode/unscored"] == row["episode/infrastructure"] == 0 for row in sampled)
    rollout = Result(tmp_path / "run").rollouts[0]
    assert rollout["response"].startswith("[assistant]")
    assert (tmp_path / "run/model/model.safetensors").exists()


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        (["--episode.max_turns", "0"], "episode.max_turns must be at least 1"),
        (["--episode.max_tokens", "512"], "episode.max_tokens must be at most training.seq_len = 256"),
        (["--episode.syntax", "xml"], "episode: syntax must be one of hermes, llama3, plain"),
        (["--dataset.chat_template", "true"], "dataset.chat_template must be false"),
        (["--sandbox.level", "cellar"], "sandbox: level must be"),
        (["--sandbox.level", "none"], "allow_unsafe"),
        (["--attempts", "9"], "attempts must be at most episode.max_turns"),
        (["--tests", "{credit: some}"], "tests.credit: Input should be 'all' or 'share'"),
        (["--tests", "{time_limt: 1.0}"], "unknown key 'tests.time_limt'; did you mean 'time_limit'"),
    ],
)
def test_invalid_environment_settings_raise(tmp_path, setting, problem):
    cls = CodeConfig if setting[0].startswith(("--sandbox", "--tests", "--attempts")) else ToolsConfig
    with pytest.raises(ConfigError, match=problem):
        load(cls, ["--config", config(tmp_path, "apps.toys.expressions:Expression"), *setting])


def test_episode_limits_beyond_model_length_raise(tmp_path):
    path = config(tmp_path, "apps.toys.expressions:Expression")
    assert load(ToolsConfig, ["--config", path]).limits()["max_turn_tokens"] == 8
    with pytest.raises(SystemExit, match=r"episode\.max_tokens = 200 .* more than the 128 tokens"):
        launch(None, ToolsConfig, ["--config", path, "--episode.max_tokens", "200"])


def test_toy_code_demonstrations_are_right_and_injected_bugs_wrong():
    from random import Random

    for index in range(50):
        question, answer = Expression().row(index, difficulty=[1, 3])
        assert int(answer) == eval(question)
        for calculated in range(3):
            *steps, last = conversation(question, calculated)
            assert last == {"role": "assistant", "content": answer}
            for call, result in zip(steps[1::2], steps[2::2], strict=True):
                assert calc(call["content"].removeprefix("calc(").removesuffix(")")) == result["content"]
    for text in ("1+2+3", "12", "2**9", "a+1", "1+" * 50 + "1", "(1", "__import__('os')", "1.5+2"):
        with pytest.raises(ToolError):
            calc(text)
    for word, operation in programs.OPERATIONS.items():
        right, wrong = (programs.function(body(word, bugs, Random(0))) for bugs in (0.0, 1.0))
        assert operation.right in right
        seen = set()
        for seed in range(20):
            for case in programs.cases([word], Random(seed)):
                for name, text in (("right", right), ("wrong", wrong)):
                    names: dict = {}
                    exec(text, names)
                    seen.add((name, repr(eval(case["call"], names)) == case["value"]))
        assert ("right", False) not in seen
        assert ("wrong", False) in seen
