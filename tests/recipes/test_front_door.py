"""The Python front door as a user meets it: complete examples of at most 15 lines, each in a separate process."""

import subprocess
import sys
from pathlib import Path

import pytest

import forge
from forge.algorithms import ALGORITHMS, setting_names
from forge.config import ConfigError, keys_of, section_in
from forge.recipes.api import _place_setting
from forge.recipes.launch import BadInput
from forge.recipes.result import Result
from forge.recipes.rl_config import RLConfig

pytestmark = pytest.mark.processes

# A reward that closes over a variable of the script, without `if __name__ == "__main__"`.
CLOSURE = """
import forge

words = ["abc", "cab", "bca", "acb", "bac", "cba"]
rows = [{"question": word, "answer": word[::-1]} for word in words]
weight = 0.25

def backwards(prompt, response, target):
    return weight * sum(a == b for a, b in zip(response, target))

result = forge.train(None, from_scratch={"alphabet": "abc>"}, dataset=rows[2:], eval_dataset=rows[:2],
                     prompt_template="{question}>", reward=backwards, name="closure",
                     steps=2, batch_size=4, n_samples=4, max_tokens=6, seq_len=256)
print(result.model, len(result.metrics), result.rollouts[0]["rewards"])
"""


def in_script(folder: Path, code: str) -> str:
    assert len(code.strip().splitlines()) <= 15
    (folder / "script.py").write_text(code)
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_forge_train_in_script_accepts_closure_as_reward(tmp_path: Path):
    output = in_script(tmp_path, CLOSURE)
    result = Result(tmp_path / "runs" / "closure")
    assert "runs/closure/model 3 [" in output
    assert [row["step"] for row in result.metrics] == [0, 1, 2]
    assert ["eval/reward" in row for row in result.metrics] == [True, False, True]
    assert not {"abc", "cab"} & {rollout["prompt"].rstrip(">") for rollout in result.rollouts}
    assert all(reward * 4 == int(reward * 4) for rollout in result.rollouts for reward in rollout["rewards"])
    assert Path(result.model, "model.safetensors").exists()
    assert "<!doctype html>" in Path(result.report).read_text()
    written = (result.folder / "config.yaml").read_text()
    assert "__main__:backwards" in written
    assert "4 rows from Python" in written
    assert "2 rows from Python" in written


def reward(prompt: str, response: str, target: str) -> float:
    return 1.0


SMALL = {"from_scratch": {"alphabet": "abc>"}, "dataset": [{"question": "abc", "answer": "cba"}], "reward": reward}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stps": 3}, "unknown setting 'stps'; did you mean 'steps'"),
        ({"dtype": "bfloat16"}, "'dtype' is a key of several sections: write training=.* or generator="),
        ({"algorithm": "dpao"}, "unknown algorithm 'dpao': did you mean 'dapo'"),
        ({"algorithm": 3}, "algorithm 3 must be a class or a function"),
        ({"reward": 3.0}, "a reward must be a function"),
        ({"reward": lambda answer: 0.0}, r"the reward <lambda>\(answer\) has no parameter for the response"),
        (
            {"reward": lambda completions, solution, **kwargs: [0.0]},
            "row 1: the reward has a parameter 'solution', but",
        ),
        (
            {"reward": lambda response, answr: 0.0},
            "the reward has a parameter 'answr', .* question, answer; did you mean 'answer'",
        ),
        ({"reward": reward, "reward_weights": [1, 2]}, "reward.weights has 2 entries for 1 functions"),
        ({"dataset": [{"prompt": "abc"}]}, "no field 'answer': the row has prompt; set target_field to null"),
        ({"dataset": 5}, "dataset must be a path, a hub id, rows or a mapping, got 5"),
        ({"dataset": []}, "the dataset is empty"),
        ({"dataset": "no/such/file.jsonl"}, "no/such/file.jsonl"),
        ({"eval_dataset": "apps.toys.words:Reverse"}, "eval_dataset must be rows or the path of a file"),
        ({"n_samples": 0}, "grpo.n_samples must be at least 1"),
        ({"clip_hihg": 0.3}, "algorithm grpo has no setting 'clip_hihg'; did you mean 'clip_high'"),
    ],
)
def test_invalid_forge_train_arguments_start_no_process(tmp_path: Path, monkeypatch, settings: dict, message: str):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, BadInput, ValueError), match=message) as error:
        forge.train(None, **{**SMALL, "seq_len": 1024, **settings})
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))


SETTINGS = [(name, setting) for name, algorithm in ALGORITHMS.items() for setting in sorted(setting_names(algorithm))]


@pytest.mark.parametrize(("algorithm", "setting"), SETTINGS)
def test_forge_train_accepts_algorithm_settings_by_name(algorithm: str, setting: str):
    """No setting is taken for a misspelling of another, as beta for beta2."""
    [(section, values)] = _place_setting(RLConfig, setting, 0.5, algorithm).items()
    assert section == "grpo" or setting in keys_of(section_in(keys_of(RLConfig)[section].annotation))
    assert values == {setting: 0.5}
