"""`forge mismatch`: seeded faults are named by component and layer, clean runs are not accused."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import torch

import forge
from benchmarks import mismatch as cases
from benchmarks.mismatch_faults import trainer_temperature
from forge.cli import main
from forge.observability.alerts import folder_alerts
from forge.training.checkpoint import checkpoints
from forge_inspect.mismatch.differences import distance
from forge_inspect.mismatch.verdict import compare

# Those that every kind of search is in; a third of the others are in CI, as all take minutes together.
QUICK = ("template", "lora_scale")
SHARE = 3


def tiers(names, quick=()):
    """The names as parameters, most of them of the slow tests."""
    marks = [
        () if name in quick else (pytest.mark.slow if i % SHARE else pytest.mark.full) for i, name in enumerate(names)
    ]
    return [pytest.param(name, marks=mark) for name, mark in zip(names, marks, strict=True)]


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return cases.record_run(tmp_path_factory.mktemp("clean"), cases.Setup(settings={"grpo.temperature": 0.7}))


@pytest.mark.costly
@pytest.mark.parametrize("name", tiers(cases.SEEDED, QUICK))
def test_a_fault_is_named(name, tmp_path):
    verdict = cases.verdict_of(name, tmp_path)
    fault = cases.SEEDED[name]
    assert fault.component in verdict.faults[0]
    assert fault.cause in verdict.faults[0]
    assert fault.layer is None or verdict.layer == fault.layer


@pytest.mark.parametrize("name", tiers(cases.CLEAN_RUNS))
def test_a_clean_run_is_not_accused(name, tmp_path):
    verdict = cases.verdict_of(f"clean:{name}", tmp_path)
    assert verdict.faults == []
    assert verdict.tokens >= 40
    # In float32 all sides agree to much less than the tolerance.
    assert max(link.worst for link in verdict.links) < 2e-5


@pytest.mark.costly
def test_the_shares_of_a_difference_add_up(clean, tmp_path):
    folder = shutil.copytree(clean, tmp_path / "run")
    with trainer_temperature():
        verdict = compare(folder)
    shares = [link.share for link in verdict.links if link.share is not None]
    assert sum(shares) == pytest.approx(1, abs=1e-4)
    differing = [link for link in verdict.links if not link.agrees]
    assert [link.component for link in differing] == ["the trainer's forward pass", "the trainer as it trained"]
    assert verdict.component == "the trainer's forward pass"


@pytest.mark.costly
def test_the_command_says_so_and_leaves_it_for_the_page(clean, tmp_path, capsys):
    folder = shutil.copytree(clean, tmp_path / "run")
    main(["mismatch", str(folder)])
    assert "no fault: engine and trainer agree on" in capsys.readouterr().out
    assert folder_alerts(folder) == []
    # Another temperature in the configuration than the run had.
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("temperature: 0.7", "temperature: 0.9"))
    with pytest.raises(SystemExit) as ended:
        main(["mismatch", str(folder), "--bisect", "--json"])
    assert ended.value.code == 1
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["is_sound"] is False
    assert verdict["kind"] == "temperature"
    assert re.search(r"those of temperature 0\.7, and grpo.temperature is 0\.9", verdict["cause"])
    (alert,) = folder_alerts(folder)
    assert alert.finding == verdict["sentence"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda folder: (folder / "metrics.jsonl").unlink(), "is not a run that has made a step"),
        (lambda folder: (folder / "rollouts.arrow").unlink(), "has no recorded rollouts: set metrics.rollouts"),
        (
            lambda folder: (folder / "config.yaml").write_text("model: /nowhere\n"),
            "model folder /nowhere does not exist",
        ),
        (
            lambda folder: (folder / "config.yaml").write_text("model: x\ngenerator: {quantization: fp8}\n"),
            "sampled with generator.quantization fp8, which is a difference by itself",
        ),
        (lambda folder: (folder / "config.yaml").write_text("a: [1"), "is not valid YAML"),
        (lambda folder: next((folder / "checkpoints/step_000002").glob("__0_0*")).write_bytes(b"x"), "cannot be read"),
    ],
    ids=["not_a_run", "no_rollouts", "no_model", "quantised", "no_yaml", "damaged_checkpoint"],
)
def test_bad_input_is_one_line_and_exit_code_2(change, reason, clean, tmp_path, capsys):
    folder = shutil.copytree(clean, tmp_path / "run")
    change(folder)
    with pytest.raises(SystemExit) as ended:
        main(["mismatch", str(folder)])
    lines = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert reason in lines[0]


def test_a_step_that_nothing_was_recorded_of_is_bad_input(clean, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["mismatch", str(clean), "--step", "9"])
    assert ended.value.code == 2
    assert "no rollouts of step 9 were sampled by weights that" in capsys.readouterr().err


def test_one_sequence_that_differs_is_not_averaged_away():
    owners = np.repeat(np.arange(10), 10)
    first = np.zeros(100)
    second = np.where(owners == 3, 1e-3, 0.0)
    assert distance(first, second, owners) == pytest.approx(1e-3)
    # Tokens of a mixture that flipped between two experts are left aside.
    second = np.where(np.arange(100) == 7, 1.0, 1e-6)
    assert distance(first, second, owners) == pytest.approx(0.1, rel=1e-3)
    assert distance(first, second, owners, flipped=0.02) == pytest.approx(1e-6)
    assert distance(first, np.full(100, np.nan), owners) == 0.0


@pytest.mark.full
@pytest.mark.processes
def test_a_whole_run_with_processes_is_sound(tmp_path):
    folder = forge.train(
        None,
        name="run",
        run={"root": str(tmp_path)},
        from_scratch={"alphabet": "abcdefghijkl>", "hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1},
        dataset={"task": "apps.toys.words:Reverse", "difficulty": [2, 3], "prompt_template": "{question}>"},
        reward="CharacterMatch",
        training={"batch_size": 4, "steps": 4, "learning_rate": 1e-2, "seq_len": 256},
        grpo={"n_samples": 4, "max_tokens": 8, "temperature": 0.8},
        checkpoint={"every": 2, "keep": 4},
        metrics={"rollouts": "all"},
        **{"async": {"max_policy_age": 0}},
    ).folder
    verdict = compare(folder, bisect=True)
    assert verdict.faults == []
    assert (verdict.step, verdict.version) == (3, 2)
    assert "recorded trainer" in {link.second for link in verdict.links}
    assert len(checkpoints(folder / "checkpoints")) == 2
    assert torch.isfinite(torch.tensor([link.worst for link in verdict.links])).all()


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize(
    "settings", [{}, {"parallelism.tensor_parallel_degree": 2, **cases.LORA}], ids=["shards", "tp"]
)
def test_the_ranks_of_a_trainer_are_repeated(settings, tmp_path):
    setup = cases.Setup("llama", settings={"services.trainer.procs": 2, **settings})
    verdict = compare(cases.record_run(tmp_path, setup))
    assert verdict.faults == []
    (link,) = [link for link in verdict.links if link.second == "trainer now, over its ranks"]
    assert 0 < link.worst < 2e-5


@pytest.mark.full
@pytest.mark.processes
def test_ranks_that_cannot_be_repeated_are_one_line(tmp_path, capsys):
    setup = cases.Setup(settings={"services.trainer.procs": 2, "parallelism.tensor_parallel_degree": 3})
    folder = cases.record_run(tmp_path, setup)
    with pytest.raises(SystemExit) as ended:
        main(["mismatch", str(folder)])
    assert ended.value.code == 2
    assert "error: a rank of the trainer failed: ValueError: parallelism" in capsys.readouterr().err
