"""The server of `forge watch`: what it answers, what it must never read, and whom it rejects."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pyarrow as pa
import pytest

from benchmarks.watch import write_run
from forge.observability import Run
from forge.observability.metrics import Snapshot
from forge.observability.rollouts import ROLLOUTS, read_batches
from forge.types import Episode, Group
from forge_http.web import bind_socket
from forge_inspect.watch.report import write_report
from forge_inspect.watch.server import Watch
from forge_inspect.watch.views import RunView

EPISODES = 512


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("watched") / "runs"
    write_run(root, "a", EPISODES, 24, rows=30, settings={"seed": 0})
    write_run(root, "b", EPISODES // 2, 24, rows=30, settings={"seed": 1})
    return root


def served(root: Path, ask: Callable[[aiohttp.ClientSession, str, Watch], Any], key: str | None = None) -> Any:
    async def go() -> Any:
        watch = Watch(root, key=key)
        async with watch.listen(bind_socket("127.0.0.1", 0)) as url, aiohttp.ClientSession() as session:
            return await ask(session, url, watch)

    return asyncio.run(go())


def get(root: Path, path: str, **query: Any) -> Any:
    """A JSON answer, or the status and the error."""

    async def ask(session: aiohttp.ClientSession, url: str, _: Watch) -> Any:
        async with session.get(f"{url}/api/{path}", params=query) as answer:
            found = await answer.json()
            return found if answer.status == 200 else (answer.status, found["error"])

    return served(root, ask)


def test_watch_api_lists_runs_and_metrics(runs: Path):
    found = get(runs, "runs")
    assert [(run["run"], run["state"], run["step"]) for run in found] == [("a", "finished", 34), ("b", "finished", 32)]
    assert get(runs, "run", run="a")["settings"]["async.max_policy_age"] == 1
    curves = get(runs, "rows", run="a", after=30)
    assert curves["rows"] == 34
    rows = [json.loads(line) for line in (runs / "a/metrics.jsonl").read_text().splitlines()]
    assert curves["columns"]["step"] == [31, 32, 33, 34]
    assert curves["columns"]["train/loss"] == pytest.approx([row["train/loss"] for row in rows[30:]], rel=1e-6)
    assert get(runs, "differences", run=["a", "b"])["seed"] == [0, 1]
    assert len(get(runs, "trace", run="a")["found"]) > 34


def test_watch_rollout_filters_match_plain_python_loop(runs: Path):
    rows = [row for _, batch in read_batches(runs / "a" / ROLLOUTS) for row in batch.to_pylist()]
    for query, holds in (
        ({}, lambda row: True),
        ({"reward_min": "0.5"}, lambda row: row["reward"] >= 0.5),
        ({"step_min": "2", "step_max": "3"}, lambda row: 2 <= row["step"] <= 3),
        ({"length_max": "10", "reason": "trained"}, lambda row: row["length"] <= 10 and row["dropped"] is None),
        ({"reason": "zero_advantage"}, lambda row: row["dropped"] == "zero_advantage"),
        ({"reason": "dropped", "version_max": "1"}, lambda row: row["dropped"] is not None and row["version"] <= 1),
        ({"group_min": "7", "group_max": "7"}, lambda row: row["group"] == 7),
        ({"text": "QUESTION 12:"}, lambda row: "question 12:" in row["prompt"].lower()),
    ):
        expected = [number for number, row in enumerate(rows) if holds(row)]
        found = RunView(runs / "a").rollouts(query)
        assert (found["total"], found["all"]) == (len(expected), EPISODES)
        assert [row["row"] for row in found["rows"]] == sorted(expected, key=lambda n: rows[n]["step"])[:50], query
        assert sum(found["histogram"]["counts"]) == len(expected)
    longest = RunView(runs / "a").rollouts({"sort": "length", "down": "1", "page": "1"})["rows"]
    assert [row["length"] for row in longest] == sorted((row["length"] for row in rows), reverse=True)[50:100]
    assert get(runs, "rollouts", run="a", sort="prompt")[0] == 400
    assert get(runs, "rollouts", run="a", reward_min="much")[0] == 400


def test_watch_rollout_api_returns_all_fields(runs: Path):
    rows = [row for _, batch in read_batches(runs / "a" / ROLLOUTS) for row in batch.to_pylist()]
    for number in (0, 130, EPISODES - 1):
        row = get(runs, "rollout", run="a", row=number)
        assert (row["tokens"], row["texts"]) == (rows[number]["tokens"], rows[number]["texts"])
        np.testing.assert_allclose(np.array(row["loss"], float), np.array(rows[number]["loss"], float), rtol=1e-6)
        assert {one["group"] for one in get(runs, "group", run="a", row=number)} == {row["group"]}
    assert get(runs, "rollout", run="a", row=EPISODES) == (404, "there are 512 rollouts, and this is number 512")


def test_watch_server_lists_added_and_drops_removed_runs(tmp_path: Path):
    def step(run: Run, number: int, reward: float) -> None:
        episode = Episode(prompt_ids=[1], response_ids=[2, 3], reward=reward)
        run.log_rollouts(number, [Group([episode], number)])
        run.log(number, Snapshot(), reward=reward)

    run = Run("one", {}, steps=9, root=str(tmp_path))
    run.record(1, 1e9, str)
    step(run, 1, 0.0)
    view = RunView(tmp_path / "one")
    for number in (2, 3, 4):
        step(run, number, 0.5)
        view.refresh()
        assert len(view.rows) == view.rollouts({})["all"] == number
    before = view.version
    run.close()
    again = Run("one", {}, steps=9, root=str(tmp_path), resume="a checkpoint", start=2)
    again.record(1, 1e9, str)
    step(again, 3, 1.0)
    view.refresh()
    assert view.version != before
    assert [row["reward"] for row in view.rows] == [0.0, 0.5, 1.0]
    assert [row["reward"] for row in view.rollouts({})["rows"]] == [0.0, 0.5, 1.0]
    marks = [event["args"]["step"] for event in view.events if event["ph"] == "i"]
    assert marks == [1, 2, 3, 4, 3]  # the time of what was done again was spent
    again.close()
    assert json.loads((tmp_path / "one/trace.json").read_text())


@pytest.mark.parametrize(
    "name", ["..", "../outside", "a/../../outside", "/etc", "a\0b", "link", "linked", "x" * 5000, "a/model", ""]
)
def test_watch_server_rejects_paths_outside_runs_directory(tmp_path: Path, name: str):
    for place in ("outside", "runs/a", "runs/linked"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "config.yaml").write_text("secret: 1")
    (tmp_path / "runs/link").symlink_to(tmp_path / "outside")
    (tmp_path / "outside/metrics.jsonl").write_text('{"step": 1, "secret": 1}\n')
    (tmp_path / "runs/linked/metrics.jsonl").symlink_to(tmp_path / "outside/metrics.jsonl")
    assert [run["run"] for run in get(tmp_path / "runs", "runs")] == ["a"]
    for path in ("run", "rows", "trace", "rollouts"):
        status, error = get(tmp_path / "runs", path, run=name)
        assert status in (400, 404)
        assert "secret" not in error


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
def test_watch_server_rejects_other_hosts_and_origins(runs: Path, headers: dict[str, str], status: int):
    async def ask(session: aiohttp.ClientSession, url: str, _: Watch) -> list[int]:
        found = []
        for path in ("/", "/main.js", "/api/runs", "/api/rollouts?run=a"):
            async with session.get(url + path, headers=headers) as answer:
                found.append(answer.status)
                assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
        return found

    assert served(runs, ask) == [status] * 4


def test_watch_server_requires_configured_api_key(runs: Path):
    async def ask(session: aiohttp.ClientSession, url: str, _: Watch) -> list[int]:
        found = []
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer right"}):
            async with session.get(f"{url}/api/runs", headers=headers) as answer:
                found.append(answer.status)
        return found

    assert served(runs, ask, key="right") == [401, 401, 200]


HOSTILE = "<script>document.title='owned'</script>\x1b[31m\u202e</script><!--"


def hostile_run(root: Path, name: str) -> Path:
    """A run whose files hold markup, ANSI codes, a line of 1 MB, damaged lines, and text that is not UTF-8."""
    run = Run(name, {"seed": 0, "odd": HOSTILE}, steps=9, root=str(root))
    run.record(1, 1e9, lambda _: HOSTILE)
    for step, text in enumerate((HOSTILE, "x" * (1 << 20), "bytes"), 1):
        episode = Episode(prompt_ids=[1], response_ids=[2, 3], reward=1.0, info={"parts": {HOSTILE: 1.0}})
        episode.text = text
        run.log_rollouts(step, [Group([episode], step, HOSTILE, text)])
        run.log(step, Snapshot(), **{"reward": 1.0, HOSTILE: 1.0})
    run.close()
    with (root / name / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe{\n[1]\n" + b"[" * 100_000 + b'\n{"step": 4.0, "reward": "no"}\n{"step": 5')
    with (root / name / "trace.json").open("ab") as file:
        file.write(b'\n,{"ph": "X", "name": 3, "pid": "x"}\n,{\xff\n,{"ph"')
    path = root / name / ROLLOUTS
    path.write_bytes(path.read_bytes().replace(b"bytes", b"\xff\xfe\xfd\x80\x81"))
    return root / name


def test_watch_api_returns_hostile_content_unchanged(tmp_path: Path):
    hostile_run(tmp_path, "a<b>")
    (summary,) = get(tmp_path, "runs")
    assert (summary["run"], summary["step"], summary["rollouts"]) == ("a<b>", 4, 3)
    assert get(tmp_path, "run", run="a<b>")["settings"]["odd"] == HOSTILE
    assert get(tmp_path, "rollouts", run="a<b>", text="<SCRIPT>")["total"] == 3  # in the target
    row = get(tmp_path, "rollout", run="a<b>", row=0)
    assert (row["prompt"], row["texts"]) == (HOSTILE, [HOSTILE] * 3)
    assert len(get(tmp_path, "rollout", run="a<b>", row=1)["response"]) == 1 << 20
    assert len(get(tmp_path, "rollouts", run="a<b>")["rows"][1]["response"]) < 1000
    assert get(tmp_path, "rollout", run="a<b>", row=2)["response"] == "\ufffd" * 5
    write_report(tmp_path / "a<b>")
    page = (tmp_path / "a<b>/report.html").read_text()
    assert page.count("<script") == 3  # the data, the charts and the page's own
    assert "<title>a&lt;b&gt;</title>" in page


def test_damaged_rollouts_file_does_not_stop_watch_server(tmp_path: Path):
    folder = write_run(tmp_path, "one", 128, 8)
    whole = (folder / ROLLOUTS).read_bytes()
    draw = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(whole)
        for at in draw.integers(0, len(damaged), 20):
            damaged[at] = draw.integers(0, 256)
        (folder / ROLLOUTS).write_bytes(damaged)
        try:
            view = RunView(folder)
            found = view.rollouts({"text": "the"})
            for row in found["rows"][:3]:
                json.dumps(view.group(row["row"]), allow_nan=False)
        except (ValueError, OSError, IndexError, pa.ArrowException):
            continue
