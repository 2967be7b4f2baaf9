"""A panel over many problems."""

import asyncio
import logging
import math

import numpy as np
import pytest

from forge.rewards import Scores
from forge_verifiers import Panel, Rule
from forge_weaver import Problem, read_problems, score_table, write_problems


def length(prompt, response, target):
    if response == "bad":
        raise ValueError("bad one")
    return len(response)


def matches(prompt, response, target):
    return None if target is None else float(response == target)


PROBLEMS = [
    Problem("p", ["a", "bad", "ccc"], target="a", labels=[1, 0, math.nan], answers=["1", "2", "3"]),
    Problem("q", ["dd"], answers=["4"]),
]


def test_problems_of_unequal_response_counts_form_one_score_table(caplog):
    panel = Panel([Rule(length), Rule(matches)])
    with caplog.at_level(logging.WARNING):
        table = asyncio.run(score_table(panel, PROBLEMS, concurrency=2))
    nan = math.nan
    np.testing.assert_array_equal(table.scores[..., 0], [[1, nan, 3], [2, nan, nan]])
    np.testing.assert_array_equal(table.scores[..., 1], [[1, 0, 0], [nan, nan, nan]])
    np.testing.assert_array_equal(table.labels, [[1, 0, nan], [nan, nan, nan]])
    np.testing.assert_array_equal(table.present, [[True] * 3, [True, False, False]])
    assert table.verifiers == ("length", "matches")
    assert (table.answers, table.prompts) == ([["1", "2", "3"], ["4"]], ["p", "q"])
    assert "length: 1 of 4 scores are missing: 1 x ValueError: bad one" in caplog.text
    assert "matches: 1 of 4 scores are missing: 1 x the verifier returned no score (None)" in caplog.text


def test_scores_of_one_verifier_model_form_one_family():
    class Process:
        names = ("prm_min", "prm_last", "other")

        async def score(self, prompt, responses, target=None):
            return Scores(np.zeros((len(responses), 3)))

    assert asyncio.run(score_table(Process(), PROBLEMS)).families == ("prm", "prm", "other")


def test_failing_verifier_leaves_only_one_problem_unscored():
    class Picky:
        names = ("picky",)

        async def score(self, prompt, responses, target=None):
            if prompt == "p":
                raise OSError("gone")
            return await Rule(length).score(prompt, responses, target)

    table = asyncio.run(score_table(Picky(), PROBLEMS))
    assert np.isnan(table.scores[0]).all()
    assert table.scores[1, 0, 0] == 2


def test_weaver_problems_file_round_trips(tmp_path):
    problems = [
        Problem("a\u2028b \u00e9", ["x\x85y", ""], target="t", labels=[True, None], answers=["1", ""]),
        Problem("q", ["z"]),
    ]
    write_problems(tmp_path / "problems.jsonl", problems)
    again = read_problems(tmp_path / "problems.jsonl")
    assert repr(again) == repr(problems)
    assert again[0].labels[0] == 1
    assert math.isnan(again[0].labels[1])
    (tmp_path / "raw.jsonl").write_bytes('\n{"prompt": "a\u2028b", "responses": ["\x85"]}\r\n \r\n\n'.encode())
    assert read_problems(tmp_path / "raw.jsonl") == [Problem("a\u2028b", ["\x85"])]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": 3, "responses": ["a"]}', "prompt: 3 is not of type .string."),
        (b'{"prompt": "p", "responses": "ab"}', "responses: .ab. is not of type .array."),
        (b'{"prompt": "p", "responses": ["a", 1]}', r"responses\[1\]: 1 is not of type .string."),
        (b'{"prompt": "p", "responses": ["a"], "target": 4}', "target: 4 is not of type"),
        (b'{"prompt": "p", "responses": ["a"], "answers": [null]}', r"answers\[0\]: None is not of type"),
        (b'{"prompt": "p", "responses": ["a"], "labels": ["1"]}', r"labels\[0\]: .1. is not one of"),
        (b'{"prompt": "p", "responses": ["a"], "labels": [0.5]}', r"labels\[0\]: 0.5 is not one of"),
        (b'{"prompt": "p", "responses": ["a"], "labels": 3}', "labels: 3 is not of type .array."),
        (b'{"prompt": "\xff", "responses": ["a"]}', "utf-8"),
    ],
)
def test_invalid_weaver_problem_line_error_names_line_number(tmp_path, line, message):
    path = tmp_path / "problems.jsonl"
    path.write_bytes(b'{"prompt": "p", "responses": ["a"]}\n' + line + b"\n")
    with pytest.raises(ValueError, match=f"line 2: .*{message}"):
        read_problems(path)


def test_invalid_weaver_problems_raise():
    with pytest.raises(ValueError, match="2 labels for 1 responses"):
        Problem("p", ["a"], labels=[1, 0])
    with pytest.raises(ValueError, match="either all problems or none must have answers"):
        asyncio.run(score_table(Panel([Rule(length)]), [PROBLEMS[0], Problem("r", ["a"])]))
