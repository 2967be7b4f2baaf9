"""Score tables: what is refused, what is taken apart, and that files give back what was written."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from forge.rewards import AnswerFrequency
from forge_weaver import ScoreTable, check_one_right, families_by_name
from forge_weaver.formats import from_public


def ragged() -> ScoreTable:
    """Three problems of 3, 1 and 2 responses, two verifiers, one score missing."""
    scores = np.arange(18, dtype=float).reshape(3, 3, 2)
    present = np.array([[True, True, True], [True, False, False], [True, True, False]])
    scores[~present] = np.nan
    scores[0, 1, 0] = np.nan
    return ScoreTable(
        scores,
        ("prm_min", "judge"),
        labels=np.where(present, [[1, 0, 0], [1, 0, 0], [0, np.nan, 0]], np.nan),
        answers=[["4", "5", ""], ["x"], ["1", "1"]],
        prompts=["2+2", 'a "quoted"\nprompt', "é"],
        responses=[["four", "five", ""], ["x"], ["one", "ein"]],
        families=("prm", "judge"),
        present=present,
    )


def same(one: ScoreTable, other: ScoreTable) -> None:
    for field in fields(ScoreTable):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b, err_msg=field.name)
        else:
            assert a == b, field.name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scores": np.zeros((3, 3))}, "problems, responses, verifiers"),
        ({"scores": np.full((3, 3, 2), np.inf)}, "infinite"),
        ({"scores": np.zeros((3, 3, 2))}, "not present"),
        ({"verifiers": ("a",)}, "1 names for 2"),
        ({"verifiers": ("a", "a")}, "verifier names must be unique and non-empty: a"),
        ({"labels": np.full((3, 3), 0.5)}, r"a label is 0\.5"),
        ({"labels": np.zeros((3, 2))}, "labels are"),
        ({"present": np.zeros((3, 3), bool)}, "True from"),
        ({"present": np.ones((3, 3))}, "must be bool"),
        ({"answers": [["a"], ["b"], ["c"]]}, "3 responses and 1 answers"),
        ({"prompts": ["a"]}, "1 prompts for 3"),
        ({"families": ("a",)}, "1 families"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict, said: str):
    given = {field.name: getattr(ragged(), field.name) for field in fields(ScoreTable)} | change
    with pytest.raises(ValueError, match=said):
        ScoreTable(**given)


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_a_file_gives_back_the_table(tmp_path: Path, suffix: str):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"scores{suffix}"
    bare = ScoreTable(np.array([[[0.1], [np.nan]]]), ("only",))
    for table in (ragged(), bare):
        table.save(path)
        same(ScoreTable.load(path), table)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_files_that_are_no_tables(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no such score table"):
        ScoreTable.load(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(ValueError, match="is not a score table"):
        ScoreTable.load(tmp_path / "text.npz")
    with pytest.raises(ValueError, match="cannot write"):
        ragged().save(tmp_path / "scores.csv")
    assert not (tmp_path / "scores.csv").exists()


def test_parquet_of_ones_own(tmp_path: Path):
    """Any order of rows, problems named by text, verdicts as bools; what cannot be read is named."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "own.parquet"
    rows = {
        "problem": ["b", "a", "b", "a"],
        "response": [1, 7, 0, 3],
        "label": [True, False, None, True],
        "judge": [True, False, None, True],
        "rm": [1, 2, 3, 4],
    }
    parquet.write_table(arrow.table(rows), path)
    table = ScoreTable.load(path)
    assert table.verifiers == ("judge", "rm")
    np.testing.assert_array_equal(table.scores[..., 1], [[3, 1], [4, 2]])
    np.testing.assert_array_equal(table.scores[..., 0], [[np.nan, 1], [1, 0]])
    np.testing.assert_array_equal(table.labels, [[np.nan, 1], [1, 0]])
    for change, said in (
        ({"response": [1, 7, 1, 3]}, "several responses of one number"),
        ({"note": ["w", "x", "y", "z"]}, "numbers a verifier: note"),
        ({"prompt": ["p", "q", "r", "q"]}, "several prompts"),
    ):
        parquet.write_table(arrow.table(rows | change), path)
        with pytest.raises(ValueError, match=said):
            ScoreTable.load(path)
    parquet.write_table(arrow.table({"rm": [1.0]}), path)
    with pytest.raises(ValueError, match="neither a column problem"):
        ScoreTable.load(path)


PUBLIC = [
    {
        "instruction": "What is 1+1?",
        "samples": ["two", "three"],
        "extracted_answers": ["2", None],
        "answer_correct": [True, False],
        "answer": "2",
        "PRM_min_scores": [0.5, None],
        "PRM_max_scores": [0.9, 0.2],
        "PRM_step_scores": [[0.5, 0.9], [0.2]],
        "Judge_verdicts": [[1.0, 0.0], [None]],
        "weaver_scores": [0.9, 0.1],
    },
    {
        "instruction": "And 2+2?",
        "samples": ["four"],
        "extracted_answers": ["4"],
        "answer_correct": [True],
        "answer": "4",
        "PRM_min_scores": [0.7],
        "PRM_max_scores": [0.8],
        "PRM_step_scores": [[0.7, 0.8]],
        "Judge_verdicts": None,
        "weaver_scores": [0.9],
    },
]


def test_the_public_layout(tmp_path: Path):
    table = from_public(PUBLIC)
    assert table.verifiers == ("Judge", "PRM_max", "PRM_min")
    assert table.families == ("Judge", "PRM", "PRM")
    nan = np.nan
    np.testing.assert_array_equal(table.scores, [[[0.5, 0.9, 0.5], [nan, 0.2, nan]], [[nan, 0.8, 0.7], [nan] * 3]])
    np.testing.assert_array_equal(table.labels, [[1, 0], [1, nan]])
    assert table.answers == [["2", ""], ["4"]]
    assert table.prompts == ["What is 1+1?", "And 2+2?"]
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.Table.from_pylist(PUBLIC), tmp_path / "public.parquet")
    same(ScoreTable.load(tmp_path / "public.parquet"), table)
    with pytest.raises(ValueError, match="problem 0: 1 values in PRM_max_scores for 2"):
        from_public([{**PUBLIC[0], "PRM_max_scores": [1.0]}])
    with pytest.raises(ValueError, match="no column ends in _scores"):
        from_public([{"samples": ["a"]}])


def test_public_rows_of_other_kinds(tmp_path: Path):
    row = {"A_scores": np.array([0.1, 0.2]), "samples": np.array(["a", "b"]), "A_verdicts": [np.True_, np.False_]}
    rows = [
        {**row, "P_min_scores": [1, 2], "P_max_scores": [3, 4], "instruction": "q"},
        {**row, "P_min_scores": [1, 2], "P_max_scores": [3, 4], "instruction": None},
    ]
    table = from_public(rows)
    assert table.verifiers == ("A_scores", "A_verdicts", "P_max", "P_min")
    assert table.families == ("A", "A", "P", "P")
    np.testing.assert_array_equal(table.scores[0, :, 1], [1, 0])
    assert table.prompts == ["q", ""]
    with pytest.raises(ValueError, match="problem 0, answer_correct: labels are 1, 0 or missing"):
        from_public([{**row, "answer_correct": ["yes", "no"]}])
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for kind in (arrow.large_list(arrow.float64()), arrow.list_(arrow.float64(), 2)):
        parquet.write_table(arrow.table({"A_scores": arrow.array([[0.1, 0.2]], kind)}), tmp_path / "large.parquet")
        np.testing.assert_array_equal(ScoreTable.load(tmp_path / "large.parquet").scores, [[[0.1], [0.2]]])


def test_odd_columns_of_parquet(tmp_path: Path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "odd.parquet"
    rows = {"problem": [0, 1], "rm": [2**60 + 1, 3], "prompt": ["a", None]}
    parquet.write_table(arrow.table(rows), path)
    table = ScoreTable.load(path)
    np.testing.assert_array_equal(table.scores.ravel(), [2.0**60, 3])
    assert table.prompts == ["a", ""]
    parquet.write_table(arrow.table({**rows, "prompt": arrow.array([None, None], arrow.string())}), path)
    assert ScoreTable.load(path).prompts is None
    for change, said in (
        ({"response": [None, 1]}, r"odd\.parquet: the column response has rows without"),
        ({"label": ["yes", "no"]}, r"odd\.parquet: column label: labels are"),
    ):
        parquet.write_table(arrow.table(rows | change), path)
        with pytest.raises(ValueError, match=said):
            ScoreTable.load(path)


def test_columns_that_others_have_added(tmp_path: Path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "added.parquet"
    ragged().save(path)
    saved = parquet.read_table(path)
    for name, values in (("__index_level_0__", range(6)), ("mine", [0.5] * 6)):
        saved = saved.append_column(name, arrow.array(values))
    parquet.write_table(saved, path)
    table = ScoreTable.load(path)
    assert table.verifiers == ("prm_min", "judge", "mine")
    assert table.families == ("prm", "judge", "mine")
    nan = float("nan")
    for rows, said in (
        (saved.append_column("mine", arrow.array([0.5] * 6)), "several columns called mine"),
        (arrow.table({"problem": [[1], [1]], "rm": [1.0, 2.0]}), "column problem has rows without a number or a name"),
        (arrow.table({"problem": [nan, nan], "rm": [1.0, 2.0]}), "column problem has rows without a number or a name"),
        (arrow.table({"a_scores": arrow.array([], arrow.list_(arrow.float64()))}), "there are no rows"),
    ):
        parquet.write_table(rows, path)
        with pytest.raises(ValueError, match=rf"added\.parquet.*{said}"):
            ScoreTable.load(path)


def test_a_damaged_table_is_said_to_be_one(tmp_path: Path):
    path = tmp_path / "scores.npz"
    ragged().save(path)
    whole = path.read_bytes()
    with np.load(path) as file:
        arrays = dict(file)
    for at in range(0, len(whole), len(whole) // 60):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with contextlib.suppress(ValueError):  # nothing else, such as zlib.error
            ScoreTable.load(path)
    np.savez(path, more=np.ones(1), **arrays)
    with pytest.raises(ValueError, match="also has more"):
        ScoreTable.load(path)
    del arrays["present"]
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match="lacks 'present'"):
        ScoreTable.load(path)


def test_parts_of_a_table():
    table = ragged()
    assert len(table) == 3
    part = table.take([2, 0])
    assert part.prompts == ["é", "2+2"]
    np.testing.assert_array_equal(part.scores[1], table.scores[0])
    same(table.take(np.array([True, True, True])), table)
    hidden = table.with_labels_of([1])
    np.testing.assert_array_equal(hidden.labelled_problems(), [1])
    assert len(table.with_labels_of([]).labelled_problems()) == 0
    swapped = table.select(("judge", "prm_min"))
    assert swapped.families == ("judge", "prm")
    np.testing.assert_array_equal(swapped.scores[..., 0], table.scores[..., 1])
    with pytest.raises(ValueError, match="no scores of other: it has prm_min, judge"):
        table.select(["other"])
    np.testing.assert_array_equal(table.spread(np.arange(6.0))[2], [4, 5, np.nan])
    np.testing.assert_array_equal(table.problem_of, [0, 0, 0, 1, 2, 2])


def test_answer_frequency_is_what_the_verifier_says():
    table = replace(ragged(), answers=[["7", "7", "8"], ["7"], ["5", ""]])
    found = table.with_answer_frequency()
    assert found.verifiers[-1] == "answer_frequency"
    np.testing.assert_array_equal(found.scores[..., -1], [[0.5, 0.5, 0], [np.nan] * 3, [0, 0, np.nan]])
    verifier = AnswerFrequency(lambda text: text or None)
    for answers, column in zip(found.answers or [], found.scores[..., -1], strict=True):
        said = asyncio.run(verifier.score("?", answers)).values[:, 0]
        np.testing.assert_array_equal(said, column[: len(answers)])
    with pytest.raises(ValueError, match="no answers to count"):
        replace(table, answers=None).with_answer_frequency()


@pytest.mark.parametrize(
    ("labels", "good"),
    [
        ([[1, 0, 0], [1, 0, 0], [0, 1, 0]], True),
        ([[1, np.nan, 0], [1, 0, 0], [0, np.nan, 0]], True),  # the one may be among those not known
        ([[1, 1, np.nan], [1, 0, 0], [0, 1, 0]], False),
        ([[1, 0, 0], [0, 0, 0], [0, 1, 0]], False),
    ],
)
def test_labels_that_leave_one_right_response_possible(labels, good: bool):
    table = ragged()
    table = replace(table, labels=np.where(table.present, labels, np.nan))
    with contextlib.nullcontext() if good else pytest.raises(ValueError, match="1 problems have none or several"):
        check_one_right(table)


def test_families_are_read_off_names():
    assert families_by_name(["PRM_min", "PRM_last", "gpt_mini"]) == ("PRM", "PRM", "gpt_mini")
