"""`forge mismatch`: a fault is placed between two sides, and a clean run is not accused."""

import json
import shutil

import pytest

import forge
from forge.cli import main
from forge.training import policy as training_policy
from forge.training.checkpoint import list_checkpoints
from forge_inspect.alerts import folder_alerts
from forge_inspect.mismatch import compare_batch

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def clean(processes, fork_server, tmp_path_factory):
    return forge.train(
        None,
        name="run",
        run={"root": str(tmp_path_factory.mktemp("clean"))},
        from_scratch={"alphabet": "abcdefghijkl>", "hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1},
        dataset={"task": "apps.toys.words:Reverse", "difficulty": [2, 3], "prompt_template": "{question}>"},
        reward="CharacterMatch",
        training={"batch_size": 4, "steps": 4, "learning_rate": 1e-2, "seq_len": 256},
        grpo={"n_samples": 4, "max_tokens": 8, "temperature": 0.8},
        checkpoint={"every": 2, "keep": 4},
        metrics={"rollouts": "all"},
        **{"async": {"max_policy_age": 0}},
    ).folder


def test_mismatch_check_of_clean_run_reports_no_faults(clean):
    verdict = compare_batch(clean)
    assert verdict.faults == []
    assert (verdict.step, verdict.version) == (3, 2)
    assert "recorded trainer" in {link.second for link in verdict.links}
    assert len(list_checkpoints(clean / "checkpoints")) == 2
    assert max(link.worst for link in verdict.links) < 2e-5


def test_mismatch_check_locates_changed_forward_pass_in_trainer(clean, monkeypatch):
    token_logprobs = training_policy.token_logprobs
    monkeypatch.setattr(
        training_policy, "token_logprobs", lambda hidden, *args, **kwargs: token_logprobs(hidden * 0.9, *args, **kwargs)
    )
    verdict = compare_batch(clean)
    assert verdict.component == "the trainer's forward pass"
    differing = [link for link in verdict.links if not link.agrees]
    assert [link.component for link in differing] == ["the trainer's forward pass", "the trainer as it trained"]


def test_forge_mismatch_prints_and_saves_verdict(clean, tmp_path, capsys):
    folder = shutil.copytree(clean.parent, tmp_path / "runs") / "run"  # with the model that it began with
    main(["mismatch", str(folder)])
    assert "no fault: engine and trainer agree on" in capsys.readouterr().out
    assert folder_alerts(folder) == []
    # Another temperature in the configuration than the run had: nothing that is computed now is what was recorded.
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("temperature: 0.8", "temperature: 0.9"))
    with pytest.raises(SystemExit) as ended:
        main(["mismatch", str(folder), "--json"])
    assert ended.value.code == 1
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["is_sound"] is False
    assert verdict["component"] == "the saved weights, or the settings or the model of today"
    (alert,) = folder_alerts(folder)
    assert alert.finding == verdict["sentence"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda folder: (folder / "metrics.jsonl").unlink(), "is not a run that has made a step"),
        (lambda folder: (folder / "rollouts.arrow").unlink(), "has no recorded rollouts: run with metrics.rollouts"),
        (lambda folder: (folder / "config.yaml").write_text("a: [1"), "is not valid YAML"),
        (lambda folder: next((folder / "checkpoints/step_000002").glob("__0_0*")).write_bytes(b"x"), "cannot be read"),
    ],
    ids=["not_a_run", "no_rollouts", "no_yaml", "damaged_checkpoint"],
)
def test_invalid_forge_mismatch_input_exits_with_code_2(change, reason, clean, tmp_path, capsys):
    folder = shutil.copytree(clean.parent, tmp_path / "runs") / "run"  # with the model that it began with
    change(folder)
    with pytest.raises(SystemExit) as ended:
        main(["mismatch", str(folder)])
    lines = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert reason in lines[0]
