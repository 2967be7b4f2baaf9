"""A folder that somebody else wrote is one row of the list: it neither hides nor holds up the others."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import struct
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow as pa
import pytest

from benchmarks.watch import write_run
from forge.observability import lines, messages
from forge.observability.folder import CONFIG, ENDED, FINISHED, MARK
from forge.observability.held_out import HELD_OUT
from forge.observability.lines import Lines
from forge.observability.rollouts import ROLLOUTS, batches, count, schema
from forge.observability.runs import SERVED, rows, settings
from forge.observability.summaries import last_values, planned, summary
from forge.observability.trace import TRACE
from forge.serve.watch import Watch
from forge.serve.watch.server import MAX_VIEWS
from forge.serve.watch.views import RunView, plain
from forge.system.web import bind

FILES = (MARK, ROLLOUTS, HELD_OUT, TRACE, FINISHED, ENDED, SERVED, "lock", CONFIG)
PATHS = ("run", "rows", "trace", "rollouts", "held_out", "rollout", "group", "differences")
YAML = {
    "laughs": "a: &a [x, x, x, x, x, x, x, x]\n"
    + "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 8)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "itself": "a: &a {b: *a}",
    "itself in a list": "a: &a [1, *a]",
    "lists": "a: " + "[" * 5000,
    "mappings": "{a: " * 5000,
    "dashes": "- " * 100_000,
    "nested in time": "a: " + "[" * 90 + "]" * 90,
    "digits": "a: 1" + "0" * 400,
    "many digits": "a: 1" + "0" * 5000,
    "hexadecimal": "a: 0x" + "f" * 100_000,
    "base 60": "a: 1" + ":11" * 100_000,
    "infinity": "a: .inf\nb: .nan",
    "key": "? [a, b]\n: 1\n? {c: d}\n: 2",
    "date": "a: 2001-99-99",
    "tag": "a: !!python/object/apply:os.system [id]",
    "large": "a: " + "x" * (2 << 20),
    "bytes": "\ud800\x00",
    "list": "[1, 2]",
    "steps": "training:\n  steps: {a: [1]}\n",
    "steps of digits": "training:\n  steps: 1" + "0" * 400,
}
ROWS = {
    "digits": '{"step": 1, "x": 1' + "0" * 400 + "}\n",
    "steps of digits": '{"step": 1' + "0" * 400 + "}\n",
    "many digits": '{"step": 1, "x": 1' + "0" * 5000 + "}\n",
    "infinity": '{"step": 1, "x": 1e400, "reward": NaN, "eval/accuracy": Infinity}\n',
    "lists": "[" * 100_000 + "\n",
    "objects": '{"step": 1, "a": ' + '{"a":' * 100_000 + "\n",
    "names": '{"step": 1' + "".join(f', "{number}": 1' for number in range(10_000)) + "}\n",
    "texts": '{"step": "1", "reward": [1], "eval/accuracy": {"a": 1}}\n',
    "truth": '{"step": true, "reward": false}\n',
    "surrogate": '{"step": 1, "\\ud800": 1}\n',
    "held out": '{"step": 1'
    + "0" * 400
    + ', "problem": true, "correct": [[1]], "target": '
    + "[" * 900
    + "]" * 900
    + "}\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs", "good", 128, 8, rows=3, settings={"training": {"steps": 3}})
    shutil.copytree(tmp_path / "runs/good", tmp_path / "runs/bad")
    return tmp_path / "runs"


def answers(root: Path) -> dict[str, Any]:
    """Of the server: the rows of the list by name, and (status, answer) of each path for each run."""

    async def go() -> dict[str, Any]:
        watch = Watch(root)
        found: dict[str, Any] = {}
        async with asyncio.timeout(120), watch.listen(bind("127.0.0.1", 0)) as url, aiohttp.ClientSession() as http:
            for _ in range(2):  # the second comes from what was kept
                async with http.get(f"{url}/api/runs") as answer:
                    assert answer.status == 200
                    found["runs"] = {row["run"]: row for row in await answer.json()}
            for run in ("bad", "good"):
                for path in PATHS:
                    async with http.get(f"{url}/api/{path}", params={"run": run, "row": 0}) as answer:
                        found[run, path] = answer.status, await answer.json()
        return found

    return asyncio.run(go())


def check(root: Path) -> dict[str, Any]:
    """The good run is shown; the bad one is a row, and what it answers is one line or data."""
    found = answers(root)
    assert (found["runs"]["good"]["step"], found["runs"]["good"]["rollouts"]) == (4, 128)
    assert all(found["good", path][0] == 200 for path in PATHS)
    for path in PATHS:
        status, answer = found["bad", path]
        assert status in (200, 400, 404), answer
        if status != 200:
            assert "\n" not in answer["error"]
            assert len(answer["error"]) < 2000
    return found


@pytest.mark.parametrize("kind", ["pipe", "device", "link to a device", "link to itself", "folder", "socket", "closed"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_plain_file_is_not_waited_for(root: Path, name: str, kind: str):
    path = root / "bad" / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        try:
            os.mknod(path, 0o666 | 0o020000, os.makedev(1, 5))  # zero
        except PermissionError:
            pytest.skip("may not make devices")
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "link to itself":
        path.symlink_to(name)
    elif kind == "folder":
        path.mkdir()
    elif kind == "closed":
        path.write_bytes(b"x")
        path.chmod(0)
    else:
        with socket.socket(socket.AF_UNIX) as at:
            here = os.open(path.parent, os.O_RDONLY)
            at.bind(f"/proc/self/fd/{here}/{name}")
            os.close(here)
    check(root)


def test_a_file_behind_a_link_is_not_shown(root: Path):
    secret = root / "secret"
    secret.write_text('{"step": 77, "reward": 1}\n')
    (root / "bad" / MARK).unlink()
    (root / "bad" / MARK).symlink_to(secret)
    found = check(root)
    assert found["runs"]["bad"]["step"] == 0
    assert found["bad", "rows"][1]["rows"] == 0


@pytest.mark.parametrize("content", YAML.values(), ids=YAML)
def test_configurations(root: Path, content: str):
    (root / "bad" / CONFIG).write_bytes(content.encode(errors="surrogatepass"))
    assert check(root)["runs"]["bad"]["step"] == 4


@pytest.mark.parametrize("name", [MARK, HELD_OUT, TRACE, ENDED, SERVED, "lock"])
@pytest.mark.parametrize("content", ROWS.values(), ids=ROWS)
def test_rows(root: Path, name: str, content: str):
    with (root / "bad" / name).open("a") as file:
        file.write(content)
    check(root)
    rows(root / "bad")


@pytest.mark.parametrize("name", [MARK, HELD_OUT, TRACE, ENDED, SERVED, "lock", CONFIG, ROLLOUTS])
def test_a_file_of_holes(root: Path, name: str):
    with (root / "bad" / name).open("ab") as file:
        file.truncate(1 << 31)
    check(root)


def bomb(root: Path, size: int) -> None:
    """Have the first compressed buffer of the bad run's rollouts state another size."""
    path = root / "bad" / ROLLOUTS
    content = bytearray(path.read_bytes())
    with path.open("rb") as file:
        message = next(one for one in messages.messages(file) if one.kind == messages.BATCH)
    offset = next(offset for offset, length in message.buffers if length > 8)
    content[message.body + offset : message.body + offset + 8] = struct.pack("<q", size)
    path.write_bytes(content)


@pytest.mark.parametrize("size", [1 << 40, 1 << 62, (1 << 31) + 1, -2, -(1 << 60), 0, 1])
def test_sizes_that_a_buffer_states(root: Path, size: int):
    bomb(root, size)
    check(root)
    if size >= 1 << 31 or size < -1:
        with pytest.raises(ValueError, match="a step has more than 2048 MiB"):
            list(batches(root / "bad" / ROLLOUTS))


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_text_that_grows_a_thousandfold(root: Path, codec: str):
    """It is decompressed, as its size is allowed, and left out of the index."""
    table = schema().empty_table().to_pydict()
    row = {name: [None] for name in table} | {"finish": ["x" * (64 << 20)]}
    with pa.ipc.new_stream(
        root / "bad" / ROLLOUTS, schema(), options=pa.ipc.IpcWriteOptions(compression=codec)
    ) as stream:
        stream.write_batch(pa.record_batch(row, schema=schema()))
    found = check(root)
    assert found["bad", "rollouts"][0] == 400


@pytest.mark.parametrize(
    "head", [b"", b"\xff" * 8, b"\xff\xff\xff\xff\xff\xff\xff\x7f", b"\xff\xff\xff\xff\x10\0\0\0" + b"\xff" * 16]
)
def test_rollouts_that_are_none(root: Path, head: bytes):
    (root / "bad" / ROLLOUTS).write_bytes(head + os.urandom(9000))
    assert check(root)["runs"]["bad"]["state"] == "damaged"


def test_messages_are_those_of_arrow(root: Path):
    path = root / "good" / ROLLOUTS
    ends, sizes = zip(*((end, len(batch)) for end, batch in batches(path)), strict=True)
    with path.open("rb") as file:
        steps = [one for one in messages.messages(file) if one.kind == messages.BATCH]
    assert tuple(one.end for one in steps) == ends
    assert tuple(one.rows for one in steps) == sizes
    assert count(path) == (sum(sizes), ends[-1])
    assert count(path, ends[0]) == (sum(sizes[1:]), ends[-1])
    assert ends[-1] == path.stat().st_size


def test_a_list_is_read_in_turns(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("forge.serve.watch.server.LIST_TIMEOUT", -1.0)
    watch = Watch(root)
    assert [row["state"] for row in watch._runs(None)] == ["not read yet"] * 2
    monkeypatch.setattr("forge.serve.watch.server.LIST_TIMEOUT", 60.0)
    assert [row["step"] for row in watch._runs(None)] == [4, 4]
    monkeypatch.setattr("forge.serve.watch.server.LIST_TIMEOUT", -1.0)
    assert [row["step"] for row in watch._runs(None)] == [4, 4]


def test_a_run_has_one_view_however_it_is_spelled(root: Path):
    watch = Watch(root)
    views = {id(watch.view(name)) for name in ("good", "./good", "good/", "bad/../good", f"{root}/good")}
    assert len(views) == len(watch._views) == 1


def test_few_views_are_kept(root: Path):
    watch = Watch(root)
    for number in range(MAX_VIEWS + 4):
        (root / f"run{number}").mkdir()
        (root / f"run{number}" / CONFIG).write_text("seed: 0")
        watch.view(f"run{number}")
    assert len(watch._views) == MAX_VIEWS


def test_a_folder_that_is_closed_hides_no_run(root: Path, monkeypatch: pytest.MonkeyPatch):
    scandir = os.scandir

    def refused(folder: Path) -> Any:
        if Path(folder).name == "closed":
            raise PermissionError(folder)
        return scandir(folder)

    (root / "closed").mkdir()
    monkeypatch.setattr(os, "scandir", refused)
    assert {row["run"] for row in Watch(root)._runs(None)} == {"good", "bad"}


def test_a_large_file_is_read_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / MARK
    path.write_text("".join(f'{{"step": {number}}}\n' for number in range(1000)))
    monkeypatch.setattr(lines, "TURN", 1000)
    file, found, turns = Lines(path), list[Any](), 0
    while turns == 0 or file.behind:
        found += file.read()
        turns += 1
    assert [row["step"] for row in found] == list(range(1000))
    assert turns > 10
    assert len(rows(tmp_path)) == 1000


@pytest.mark.parametrize(("name", "most"), [("MOST_LINES", 10), ("MOST_BYTES", 100)])
def test_a_file_of_more_than_is_kept_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: int):
    (tmp_path / MARK).write_text('{"step": 1.0}\n' * 50)
    monkeypatch.setattr(lines, name, most)
    with pytest.raises(ValueError, match="has more than"):
        RunView(tmp_path)


@pytest.mark.parametrize(
    ("content", "steps"),
    [
        ("training:\n  steps: 30\n", 30),
        ("a: 1\ntraining:\n  b:\n    steps: 7\n  steps: 30\n", 30),
        ("a:\n  steps: 7\ntraining: {steps: 30}\n", 30),
        ("training:\n  b: 1\nother:\n  steps: 7\n", None),
        ("other:\n  steps: 7\n", None),
        ("training:\n  steps: null\n", None),
        ("training:\n", None),
        ("", None),
    ],
)
def test_the_steps_of_a_configuration(tmp_path: Path, content: str, steps: int | None):
    (tmp_path / CONFIG).write_text(content)
    assert planned(tmp_path) == steps
    assert settings(tmp_path).get("training.steps") == steps


def test_the_end_of_a_file_has_the_last_values(tmp_path: Path):
    path = tmp_path / MARK
    filler = "".join(f'{{"step": {step}, "reward": {step / 10}, "x": "{"y" * 300}"}}\n' for step in range(2, 900))
    path.write_text(
        '{"step": 1, "eval/accuracy": 0.5}\n' + filler + "x" * 300_000 + '\n{"step": 900}\n{"step": 901, "rew'
    )
    assert last_values(path) == {"step": 900, "reward": 89.9, "eval/accuracy": 0.5}
    path.write_text('{"step": 1, "reward": 2.0}')
    assert last_values(path) == {"reward": None, "eval/accuracy": None}
    path.write_text('{"step": 1, "reward": 2.0}\n')
    assert last_values(path) == {"step": 1, "reward": 2.0, "eval/accuracy": None}
    assert summary(tmp_path)["step"] == 1


@pytest.mark.parametrize("value", [10**5000, -(1 << 100), {"a": [1 << 70_000]}], ids=["digits", "minus", "inner"])
def test_a_number_that_takes_long_to_write_is_not_written(value: Any):
    assert len(json.dumps(plain(value))) < 300
