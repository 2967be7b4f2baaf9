"""`forge eval`: any model on the held-out problems of a configuration."""

import json

import pytest
import yaml

from forge.cli import main
from forge.models import build_small_model

pytestmark = pytest.mark.processes

TASK = {"task": "apps.toys.words:Reverse", "difficulty": [2, 3], "prompt_template": "{question}>"}
SUITE = {
    "run": {"name": "suite"},
    "dataset": TASK,
    "reward": {"functions": ["CharacterMatch"], "accuracy": "ExactMatch"},
    "training": {"seq_len": 64},
    "grpo": {"max_tokens": 5},
    "eval": {
        "problems": 6,
        "sets": {"longer": {"problems": 4, "n": 4, "dataset": TASK | {"difficulty": [5, 5]}}},
    },
}


@pytest.fixture
def model(tmp_path):
    sizes = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "max_positions": 64}
    return build_small_model(tmp_path / "model", seed=0, alphabet="abcdefghijklmnopqrstuvwxyz>", **sizes)


def write(tmp_path, **changes):
    path = tmp_path / "suite.yaml"
    path.write_text(yaml.safe_dump(SUITE | changes))
    return str(path)


@pytest.mark.full
def test_forge_eval_evaluates_all_sets_of_suite(tmp_path, model, capsys):
    answers = tmp_path / "answers.jsonl"
    main(["eval", str(model), "--suite", write(tmp_path), "--answers", str(answers), "--json"])
    metrics = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"eval/accuracy", "eval/accuracy/margin", "eval/longer/pass@4", "eval/longer/maj@4"} <= metrics.keys()
    assert "eval/pass@4" not in metrics
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [row.get("set", "") for row in rows] == [""] * 6 + ["longer"] * 16
    assert {len(row["prompt"]) for row in rows[6:]} == {6}
    rewards = [row["reward"] for row in rows[:6]]
    assert metrics["eval/reward"] == pytest.approx(sum(rewards) / 6)
    # The same again: greedy answers and the seeds of sampled ones are fixed.
    main(["eval", str(model), "--suite", write(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == metrics
    main(["eval", str(model), "--suite", write(tmp_path)])
    assert f"eval/accuracy                    {metrics['eval/accuracy']:.3f} ± " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"eval": {"problems": 0}}, "there is nothing to evaluate"),
        ({"eval": {"problem": 3}}, "unknown key 'eval.problem'; did you mean 'problems'"),
        ({"grpo": {"max_tokens": 5000}}, "grpo.max_tokens"),
    ],
)
def test_invalid_evaluation_suites_raise(tmp_path, model, changes, problem):
    with pytest.raises(SystemExit) as caught:
        main(["eval", str(model), "--suite", write(tmp_path, **changes)])
    assert str(caught.value).startswith("error: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
