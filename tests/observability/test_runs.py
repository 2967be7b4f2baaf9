"""Folders of runs, listed and compared."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge.cli import main
from forge.observability.folder import RunLock


def a_run(folder: Path, rows: list[dict[str, Any]], finished: bool = False, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"run": {"name": folder.name}, **config}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "lock").touch()
    if finished:
        (folder / "finished").touch()
    return folder


ROWS = [
    {"step": 0.0, "eval/accuracy": 0.25},
    {"step": 1.0, "reward": 0.5, "train/entropy": 2.0},
    {"step": 2.0, "reward": 0.625, "train/entropy": 1.5, "eval/accuracy": 0.75},
]


def lines(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]


def test_forge_runs_lists_state_and_last_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    a_run(tmp_path / "done", ROWS, finished=True, training={"steps": 2})
    a_run(tmp_path / "killed", ROWS[:2], training={"steps": 9})
    a_run(tmp_path / "new", [], training={"steps": 9})
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2.0, "rewa')
    (tmp_path / "no run").mkdir()
    lock = RunLock(tmp_path / "new")
    main(["runs", str(tmp_path)])
    lock.close()
    head, *found = lines(capsys)
    assert head[:5] == ["run", "state", "step", "reward", "held-out accuracy"]
    by_name = {row[0]: row[1:] for row in found}
    assert by_name["done"][:5] == ["finished", "2/2", "0.625", "0.250 -> 0.750", "1.5"]
    assert by_name["killed"][:4] == ["stopped", "1/9", "0.5", "0.250 -> 0.250"]
    assert by_name["new"][:2] == ["running", "0/9"]
    assert len(found) == 3


def test_forge_runs_escapes_hostile_directory_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    a_run(tmp_path / "good", ROWS[:2], training={"steps": 2})
    bad = a_run(tmp_path / "bad\x1b[31m", ROWS * 3)
    (bad / "lock").unlink(missing_ok=True)
    os.mkfifo(bad / "lock")
    (bad / "ended.txt").write_text("failed: \x1b]0;owned\x07")
    (bad / "other.jsonl").symlink_to("nowhere")
    main(["runs", str(tmp_path)])
    said = capsys.readouterr().out
    assert r"failed: \x1b]0;owned\x07" in said
    assert "\x1b" not in said
    assert re.search("good +stopped +1/2", said)


def test_forge_compare_uses_last_common_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one = a_run(tmp_path / "one", ROWS, training={"steps": 2, "learning_rate": 0.1}, seed=0)
    two = a_run(tmp_path / "two", ROWS[:2], training={"steps": 2, "learning_rate": 0.2}, seed=0)
    main(["compare", str(one), str(two)])
    said = [row for row in lines(capsys) if row != [""]]
    assert said[1] == ["training.learning_rate", "0.1", "0.2"]
    assert said[2] == ["at step 1", str(one), str(two), "difference"]
    assert ["reward", "0.5", "0.5", "+0"] in said
    assert ["eval/accuracy", "0.25", "0.25", "+0"] in said
    assert not any(row[0] == "train/loss" for row in said)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs", "{}/nowhere"], r"error: .*nowhere is not a directory of runs"),
        (["runs", "{}/empty"], r"error: no runs in .*empty"),
        (["compare", "{}/run"], "error: .*run is a run of none of the references"),
        (["compare", "{}/run", "{}/empty"], r"error: .*empty is not a run directory: it has no config.yaml"),
        (["compare", "{}/run", "{}/new"], r"error: .*new has no step"),
    ],
)
def test_invalid_forge_runs_input_raises_one_line_error(tmp_path: Path, words: list[str], message: str):
    a_run(tmp_path / "run", ROWS)
    a_run(tmp_path / "new", [])
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=message):
        main([word.format(tmp_path) for word in words])
