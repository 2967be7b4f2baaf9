"""`forge simulate`, and durations that are measured in a run's folder."""

import json
from pathlib import Path

import pytest
import yaml

from forge.cli import main
from forge.recipes.simulate.traces import fit, settings_of_runs

SETTINGS = {"steps": 8, "batch_size": 4, "trainer": {"step_seconds": 5.0}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(SETTINGS))
    return path


def test_a_sweep_has_a_line_for_each_value(file: Path, capsys: pytest.CaptureFixture[str]):
    main(["simulate", str(file), "--sweep", "max_policy_age=0,1", "--set", "lengths.spread=0"])
    head, lock_step, ahead = capsys.readouterr().out.splitlines()[:3]
    assert head.split()[:2] == ["max_policy_age", "s/step"]
    # 256 tokens of .02 s and 5 s of training, one after the other or together.
    assert lock_step.split()[:2] == ["0", "10.12"]
    assert float(ahead.split()[1]) < 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give a YAML file"),
        (["FILE", "--set", "max_policy_agee=1"], "did you mean 'max_policy_age'"),
        (["FILE", "--sweep", "max_policy_age"], "write KEY=VALUE"),
        (["FILE", "--seeds", "0"], "at least 1"),
        (["--run", "."], "is not a run"),
    ],
)
def test_bad_input_is_one_line(options: list[str], message: str, file: Path):
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *(str(file) if option == "FILE" else option for option in options)])
    assert message in str(ended.value)
    assert "\n" not in str(ended.value)


def write_run(folder: Path, slots: int, batch_size: int) -> None:
    """A run of equal completions of 10 tokens, whose decode step takes .1 s and .01 s more for each row."""
    config = {
        "seed": 0,
        "training": {"steps": 9, "batch_size": batch_size, "sync_interval": 1},
        "grpo": {"n_samples": 2, "max_tokens": 10},
        "async": {"max_policy_age": 0, "order": "fifo"},
        "generator": {"slots": slots, "on_update": "continue"},
        "services": {"generator": {"procs": 1, "num_replicas": 1, "with_gpus": False}, "trainer": {"procs": 1}},
        "checkpoint": {"every": 0},
    }
    rows = min(slots, 2 * batch_size)
    tokens = 20 * batch_size
    generate = tokens / rows * (0.1 + 0.01 * rows)
    numbers = {
        "generation/tokens": tokens,
        "generation/completion_length": 10.0,
        "seconds/generate": generate,
        "wall/replay_buffer.sample": generate,
        "wall/trainer.train_step": 2.0 + 0.05 * tokens,
        "wall/trainer.push_weights": 0.5,
        "wall/generator.update_weights": 0.25,
        "wall/pack": 0.125,
        "wall/log": 0.0625,
    }
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step} | numbers) + "\n" for step in range(1, 10)))


def test_durations_of_runs_are_those_that_they_were_made_from(tmp_path: Path):
    shapes = [(4, 8), (16, 8), (16, 32)]
    folders = [tmp_path / str(number) for number in range(len(shapes))]
    for folder, shape in zip(folders, shapes, strict=True):
        write_run(folder, *shape)
    settings = settings_of_runs(folders)
    assert (settings.batch_size, settings.generators.slots) == (8, 4)
    assert settings.generators.step_seconds == pytest.approx(0.1)
    assert settings.generators.row_seconds == pytest.approx(0.01)
    assert settings.generators.load_seconds == pytest.approx(0.25)
    assert settings.trainer.step_seconds == pytest.approx(2.0)
    assert settings.trainer.token_gpu_seconds == pytest.approx(0.05)
    assert settings.trainer.push_seconds == pytest.approx(0.5)
    assert settings.trainer.pack_seconds + settings.trainer.pack_sample_seconds == pytest.approx(0.125, rel=0.01)
    assert settings.trainer.log_seconds == pytest.approx(0.0625)


def test_a_fit_is_never_negative_and_gives_one_run_to_the_first_term():
    assert fit([(10.0, 1.0)], [5.0]) == (0.5, 0.0)
    assert fit([(1.0, 1.0), (2.0, 1.0)], [4.0, 5.0]) == pytest.approx((1.0, 3.0))
    first, second = fit([(1.0, 1.0), (2.0, 1.0)], [5.0, 4.0])
    assert first == 0
    assert second > 0
