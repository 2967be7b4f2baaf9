"""Folders and files of strangers: one line, little memory, no wait, and nothing of the user's is replaced."""

import json
import os

import pytest

from forge.cli import main
from forge.config import ConfigError
from forge.observability.lines import MAX_LINE, read_rows
from forge.observability.schedule import FORMAT, SCHEDULE, seal_line
from forge_inspect.alerts import AUDIT, MISMATCH, folder_alerts
from forge_inspect.replay import REPLAYED, read_schedule, replay_run

STEP = {"step": 1, "groups": [[0, "", [[0, [[0, 2]], 1.0, "d"]]]], "dropped": [], "numbers": {"train/loss": 0.5}}
HEAD = {"step": 0, "format": FORMAT, "recipe": "forge.recipes.rl:Loop", "by_hand": []}
METRICS = [{"step": 1.0, "generation/tokens": 2.0}]


def write_run(folder, *, schedule=(HEAD, STEP), metrics=METRICS, config="training: {batch_size: 1}\n", logs=""):
    folder.mkdir(parents=True)
    (folder / SCHEDULE).write_text("".join(f"{seal_line(dict(line))}\n" for line in schedule))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in metrics))
    (folder / "config.yaml").write_text(config)
    (folder / "logs.txt").write_text(logs)
    return folder


def group_of(index):
    return {**STEP, "groups": [[index, *STEP["groups"][0][1:]]]}


def replace_by(make):
    def change(path):
        path.unlink()
        make(path)

    return change


def make_sparse(path):
    with path.open("wb") as file:
        file.truncate(3 << 30)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("settings", "name", "change", "message"),
    [
        ({"schedule": (HEAD, group_of("x"))}, "", None, "cannot be used"),
        ({"metrics": [[1]]}, "", None, "metrics.jsonl is damaged in line 1"),
        ({"metrics": [{}]}, "", None, "KeyError: 'step'"),
        ({"metrics": [{"step": 1e999}]}, "", None, "cannot be used"),
        ({"metrics": []}, "", None, "neither a schedule nor"),
        ({"config": ""}, "", None, "KeyError: 'training.batch_size'"),
        ({"config": "[1]"}, "", None, "KeyError: 'training.batch_size'"),
        ({"logs": "00 100000000000 /dev/zero\n"}, "", None, "/dev/zero, which is not a file of the run"),
        ({}, "metrics.jsonl", lambda path: path.write_text("[" * 100_000 + "\n"), "metrics.jsonl is damaged in line 1"),
        ({}, "config.yaml", replace_by(os.mkfifo), "config.yaml is a pipe or a device"),
        ({}, "config.yaml", replace_by(lambda path: path.symlink_to("/dev/zero")), "config.yaml is a pipe or a device"),
        ({}, SCHEDULE, make_sparse, f"lines must have at most {MAX_LINE >> 20} MiB"),
    ],
)
def test_audit_of_hostile_run_directory_raises_one_line_error(tmp_path, settings, name, change, message):
    folder = write_run(tmp_path / "x", **settings)
    if change is not None:
        change(folder / name)
    with pytest.raises(SystemExit, match="error: ") as caught:
        main(["audit", str(folder)])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("index", "fault"), [(0, None), (10**15, "prompts that were handed out long before the end"), (-3, "number: -3")]
)
def test_audit_memory_is_bounded_for_any_group_index(tmp_path, capsys, index, fault):
    folder = write_run(tmp_path / "x", schedule=(HEAD, group_of(index)))
    if fault is None:
        main(["audit", str(folder)])
    else:
        with pytest.raises(SystemExit):
            main(["audit", str(folder)])
    assert (fault or "no fault") in capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    [
        {**STEP, "step": [1]},
        {**HEAD, "by_hand": 5},
        {"step": 0, "format": FORMAT, "by_hand": []},
        group_of(-1),
        group_of("x"),
        {**STEP, "numbers": 3},
        {**STEP, "groups": [[0, "", [[0, 5, 1.0, "d"]]]]},
    ],
)
def test_audit_names_invalid_schedule_line(tmp_path, line):
    folder = write_run(tmp_path / "x", schedule=(HEAD, line, STEP))
    with pytest.raises(ConfigError, match=r"schedule\.jsonl, line 2 .*not a valid schedule entry"):
        read_schedule(folder)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff\xfe\x00", b'{"step": 1}'])
def test_audit_names_damaged_schedule_file(tmp_path, text):
    folder = write_run(tmp_path / "x")
    (folder / SCHEDULE).write_bytes(text + b"\n")
    with pytest.raises(ConfigError, match=r"schedule\.jsonl, line 1"):
        read_schedule(folder)


@pytest.mark.parametrize("mark", [None, "of another run"])
def test_replay_does_not_overwrite_directory_of_another_run(tmp_path, mark):
    write_run(tmp_path / "x")
    other = write_run(tmp_path / "x-replay")
    if mark is not None:
        (other / REPLAYED).write_text(mark)
    with pytest.raises(ConfigError, match="x-replay is not a replay of this run"):
        replay_run(tmp_path / "x")
    assert (other / SCHEDULE).exists()


@pytest.mark.parametrize("name", [AUDIT, MISMATCH])
@pytest.mark.parametrize(
    ("change", "alerts"),
    [
        (lambda path: path.write_text("[" * 100_000), 1),
        (make_sparse, 1),
        (os.mkfifo, 0),
        (lambda path: path.symlink_to("/etc/passwd"), 0),
    ],
)
def test_alerts_for_hostile_run_files_are_reported_without_reading(tmp_path, name, change, alerts):
    change(tmp_path / name)
    assert [alert.finding for alert in folder_alerts(tmp_path)] == [f"{name} is damaged"] * alerts


def test_jsonl_line_of_unbounded_length_raises_without_reading(tmp_path):
    make_sparse(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match="got more at byte 0"):
        read_rows(tmp_path / "rows.jsonl")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\"x\\nreward: {functions: ['os:system']}\\n#\": 5\n", r"#   x\nreward: {functions: ['os:system']}\n#: 5"),
        ('"x\\rreward: 1": 5\n', r"#   x\rreward: 1: 5"),
        ('"x\\u2028reward: 1": 5\n', r"#   x\u2028reward: 1: 5"),
    ],
)
def test_converted_config_keys_cannot_escape_yaml_comments(tmp_path, capsys, text, line):
    (tmp_path / "theirs.yaml").write_text(text)
    main(["convert", "upstream", str(tmp_path / "theirs.yaml")])
    printed = capsys.readouterr().out.splitlines()
    assert any(found.startswith(line) for found in printed)
    assert not any(found.startswith("reward") for found in printed)


@pytest.mark.processes
def test_converting_a_named_pipe_raises_one_line_error(tmp_path):
    path = tmp_path / "theirs.yaml"
    os.mkfifo(path)
    with pytest.raises(SystemExit, match=r"theirs\.yaml is a pipe or a device, not a file"):
        main(["convert", "upstream", str(path)])
