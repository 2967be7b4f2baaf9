"""rollouts.arrow: what is written is read back, by other libraries too, also after a kill and a resume."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from forge.algorithms import load_algorithm
from forge.observability.rollouts import (
    IDLE,
    ROLLOUTS,
    TRAINER,
    RolloutLog,
    cut_rollouts,
    make_schema,
    read_batches,
    texts_by_group,
)
from forge.training import credit
from forge.types import Completion, Episode, Group, Turn


def group(index: int, rewards: tuple[float | None, ...] = (1.0, 0.0), prompt: str = "1 + 1 =") -> Group:
    episodes = []
    for sample, reward in enumerate(rewards):
        ids = [5 + sample] * (sample + 2)
        own = Completion("two", ids, [-0.5] * len(ids), prompt_ids=(3, 4), versions=[index] * len(ids), finish="stop")
        own.identities = {index: "abc"}
        episodes.append(Episode(own, reward, info={"parts": {"exact": reward}}))
    return Group(episodes, index, "2", prompt)


def writer(folder: Path, groups: int | str = "all", most: float = 1e9) -> RolloutLog:
    path = folder / ROLLOUTS

    def write(data: bytes) -> None:
        with path.open("ab") as file:
            file.write(data)

    return RolloutLog(path, write, groups, most, lambda token: f"<{token}>")


def read(folder: Path) -> list[dict]:
    return [row for _, batch in read_batches(folder / ROLLOUTS) for row in batch.to_pylist()]


def steps(log: RolloutLog, numbers: range) -> None:
    for step in numbers:
        log.add(step, log.pick([group(2 * step), group(2 * step + 1, (0.0, 0.0))]))


def test_recorded_rollouts_have_all_token_fields(tmp_path: Path):
    log = writer(tmp_path)
    groups = log.pick([group(8), group(7, (0.0, 0.0))])
    assert [one.index for one in groups] == [7, 8]  # in the order of the data
    batch = credit.make_batch(groups, load_algorithm("grpo"), 9, groups)
    size = int(batch.recorded.max()) + 1
    trained = {name: np.arange(size, dtype=np.float32) + i for i, name in enumerate(TRAINER)}
    log.add(10, groups, batch, trained, [("too_old", group(3))])
    rows = read(tmp_path)
    assert [row["dropped"] for row in rows] == [IDLE, IDLE, None, None, "too_old", "too_old"]
    row = rows[2]
    assert (row["step"], row["group"], row["sample"], row["branch"], row["length"]) == (10, 8, 0, 0, 2)
    assert (row["prompt"], row["response"], row["target"], row["finish"]) == ("1 + 1 =", "two", "2", "stop")
    assert (row["reward"], json.loads(row["parts"])) == (1.0, {"exact": 1.0})
    assert json.loads(row["origins"]) == [[8, "abc", ""]]
    assert (row["tokens"], row["texts"]) == ([3, 4, 5, 5], ["<3>", "<4>", "<5>", "<5>"])
    assert (row["mask"], row["versions"]) == ([False, False, True, True], [-1, -1, 8, 8])
    np.testing.assert_array_equal(row["engine_logprobs"], np.float32([np.nan, np.nan, -0.5, -0.5]))
    assert row["advantages"][2:] == pytest.approx([row["advantage"]] * 2)
    assert sum(np.nansum(one["weights"]) for one in rows) == pytest.approx(float(batch.weights.sum()))
    start = sum(len(one["tokens"]) for one in rows[:2])
    assert row["loss"] == [start + i + TRAINER.index("loss") for i in range(4)]
    assert np.isnan(rows[4]["logprobs"]).all()
    assert rows[4]["advantage"] is None
    lines = texts_by_group(next(read_batches(tmp_path / ROLLOUTS))[1])
    assert [(line["index"], line["rewards"]) for line in lines] == [(7, [0.0, 0.0]), (8, [1.0, 0.0])]


def test_rollout_branches_are_separate_rows(tmp_path: Path):
    def played(tokens: list[int], reward: float) -> Episode:
        turn = Turn(1, len(tokens), 2, "stop", reward)
        own = len(tokens) - 1
        return Episode.played(
            tokens, [False] + [True] * own, [0.0] + [-1.0] * own, [-1] + [2] * own, turns=[turn], reward=reward
        )

    episode = played([1, 2, 3], 0.5)
    episode.branches = (played([1, 4], 2.0), played([1, 5, 6], 1.5))
    writer(tmp_path).add(1, [Group([episode], 0)])
    rows = read(tmp_path)
    assert [(row["branch"], row["tokens"]) for row in rows] == [(2, [1, 4]), (1, [1, 5, 6]), (0, [1, 2, 3])]
    assert [row["reward"] for row in rows] == [2.0] * 3  # of all that was played
    assert json.loads(rows[2]["turns"]) == [[1, 3, 2, "stop", 0.5]]


def test_rollouts_file_opens_in_pandas_polars_and_datasets(tmp_path: Path):
    steps(writer(tmp_path), range(1, 4))
    expected = read(tmp_path)
    frame = pa.ipc.open_stream(tmp_path / ROLLOUTS).read_pandas()
    assert list(frame.columns) == make_schema().names
    assert frame["step"].tolist() == [row["step"] for row in expected]
    datasets = pytest.importorskip("datasets")
    found = datasets.Dataset.from_file(str(tmp_path / ROLLOUTS))
    assert (found[5]["tokens"], found[5]["texts"]) == (expected[5]["tokens"], expected[5]["texts"])
    polars = pytest.importorskip("polars")
    assert polars.read_ipc_stream(tmp_path / ROLLOUTS)["tokens"].to_list() == [row["tokens"] for row in expected]


@settings(max_examples=20)
@given(st.integers(1, 3000))
def test_partially_written_rollout_step_is_discarded(tmp_path_factory, lost: int):
    folder = tmp_path_factory.mktemp("killed")
    steps(writer(folder), range(1, 4))
    path, whole = folder / ROLLOUTS, (folder / ROLLOUTS).stat().st_size
    ends = [end for end, _ in read_batches(path)]
    os.truncate(path, max(0, whole - lost))
    left = [end for end in ends if end <= whole - lost]
    assert [end for end, _ in read_batches(path)] == left
    cut_rollouts(path, 99)
    assert path.stat().st_size == (left[-1] if left else 0)
    steps(writer(folder), range(len(left) + 1, 5))
    assert sorted({row["step"] for row in read(folder)}) == [1, 2, 3, 4]
    assert len(read(folder)) == 16


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.observability.test_rollouts import steps, writer
steps(writer(Path(sys.argv[1])), range(1, 4))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
def test_recorded_rollout_rows_are_readable_after_kill(tmp_path: Path):
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)]).returncode == -9
    assert {row["step"] for row in read(tmp_path)} == {1, 2, 3}


def test_cut_rollouts_removes_rows_of_later_steps(tmp_path: Path):
    steps(writer(tmp_path), range(1, 6))
    first = read(tmp_path)
    cut_rollouts(tmp_path / ROLLOUTS, 2)
    assert {row["step"] for row in read(tmp_path)} == {1, 2}
    steps(writer(tmp_path), range(3, 6))
    assert [row["tokens"] for row in read(tmp_path)] == [row["tokens"] for row in first]
    cut_rollouts(tmp_path / ROLLOUTS, 0)
    assert (tmp_path / ROLLOUTS).stat().st_size == 0
    cut_rollouts(tmp_path / "none.arrow", 3)


def test_recorded_rollouts_are_bounded_in_number_and_size(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    given = [group(index) for index in (5, 3, 4)]
    assert [one.index for one in writer(tmp_path, 2).pick(given)] == [3, 5]
    assert writer(tmp_path, 0).pick(given) == []
    log = writer(tmp_path, "all", most=10_000)
    steps(log, range(1, 9))
    assert 10_000 <= (tmp_path / ROLLOUTS).stat().st_size < 20_000
    assert log.pick(given) == []
    assert caplog.text.count("no more rollouts are recorded; raise metrics.rollouts_mb") == 1
    assert writer(tmp_path, "all", most=10_000).pick(given) == []  # resumed
