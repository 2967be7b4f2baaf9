"""Score tables: what is refused, what is taken apart, and that files give back what was written."""

import contextlib
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from forge_weaver import ScoreTable, families_by_name


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
        ({"labels": np.full((3, 3), 0.5)}, r"got 0\.5"),
        ({"labels": np.zeros((3, 2))}, "labels are"),
        ({"present": np.zeros((3, 3), bool)}, "True from"),
        ({"answers": [["a"], ["b"], ["c"]]}, "3 responses and 1 answers"),
        ({"prompts": ["a"]}, "1 prompts for 3"),
    ],
)
def test_inconsistent_weaver_score_table_raises(change: dict, said: str):
    given = {field.name: getattr(ragged(), field.name) for field in fields(ScoreTable)} | change
    with pytest.raises(ValueError, match=said):
        ScoreTable(**given)


def test_score_table_file_round_trips(tmp_path: Path):
    path = tmp_path / "scores.npz"
    bare = ScoreTable(np.array([[[0.1], [np.nan]]]), ("only",))
    for table in (ragged(), bare):
        table.save(path)
        same(ScoreTable.load(path), table)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_invalid_score_table_file_raises(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"score table file .* does not exist"):
        ScoreTable.load(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(ValueError, match="is not a score table"):
        ScoreTable.load(tmp_path / "text.npz")
    with pytest.raises(ValueError, match="cannot write"):
        ragged().save(tmp_path / "scores.csv")
    assert not (tmp_path / "scores.csv").exists()


def test_inconsistent_score_table_file_raises(tmp_path: Path):
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


def test_score_table_take_select_and_labels_stay_aligned():
    table = ragged()
    assert len(table) == 3
    part = table.take([2, 0])
    assert part.prompts == ["é", "2+2"]
    np.testing.assert_array_equal(part.scores[1], table.scores[0])
    same(table.take(np.array([True, True, True])), table)
    np.testing.assert_array_equal(table.with_labels_of([1]).labelled_problems(), [1])
    assert len(table.with_labels_of([]).labelled_problems()) == 0
    swapped = table.select(("judge", "prm_min"))
    assert swapped.families == ("judge", "prm")
    np.testing.assert_array_equal(swapped.scores[..., 0], table.scores[..., 1])
    with pytest.raises(ValueError, match="no scores of other: it has prm_min, judge"):
        table.select(["other"])
    np.testing.assert_array_equal(table.spread(np.arange(6.0))[2], [4, 5, np.nan])
    np.testing.assert_array_equal(table.problem_of, [0, 0, 0, 1, 2, 2])


def test_verifier_families_are_derived_from_verifier_names():
    assert families_by_name(["PRM_min", "PRM_last", "gpt_mini"]) == ("PRM", "PRM", "gpt_mini")
