"""Procedural tasks and the character tokenizer."""

import json
import math
import re
import subprocess
import sys
from itertools import islice

import pytest
from hypothesis import given, strategies as st

from apps.toys import programs
from apps.toys.expressions import Expression
from apps.toys.numbers import Add, Gcd
from apps.toys.tasks import split_of
from apps.toys.words import Reverse, Sort, SortDigits
from forge.models.tokenizer import PRINTABLE, character_tokenizer

SOLVE = {
    Reverse: lambda q: q[::-1],
    Sort: lambda q: "".join(sorted(q)),
    SortDigits: lambda q: "".join(sorted(q)),
    Add: lambda q: str(sum(map(int, q.split("+")))),
    Gcd: lambda q: str(math.gcd(*map(int, q.split(",")))),
    Expression: lambda q: str(eval(q)),
}


@pytest.mark.parametrize("task", SOLVE)
@pytest.mark.parametrize("difficulty", [2, 5, (3, 4), [4, 4], (1, 30)])
def test_toy_task_answers_are_right_at_each_difficulty(task, difficulty):
    low, high = (1, difficulty) if isinstance(difficulty, int) else difficulty
    for question, answer in islice(task().rows(difficulty=difficulty), 100):
        assert answer == SOLVE[task](question)
        for part in re.split(r"[-+*,]", question):
            assert low <= len(part) <= high


@pytest.mark.parametrize("difficulty", [1, 2, (3, 4), (1, 30)])
def test_toy_code_solutions_pass_generated_tests(difficulty):
    low, high = (1, difficulty) if isinstance(difficulty, int) else difficulty
    for question, answer in islice(programs.Program().rows(difficulty=difficulty), 100):
        words = question.split(",")
        assert low <= len(words) <= high
        names: dict = {}
        exec(programs.function("\n".join(programs.OPERATIONS[word].right for word in words)), names)
        for case in json.loads(answer):
            assert repr(eval(case["call"], names)) == case["value"]
    with pytest.raises(ValueError, match="at most 15 steps"):
        programs.Program().rows(difficulty=(16, 20))


@given(st.sampled_from([*SOLVE, programs.Program]), st.integers(1, 6), st.integers(), st.integers())
def test_toy_task_splits_share_no_question(task, difficulty, seed, other):
    try:
        test = {r.question for r in islice(task().rows(split="test", seed=seed, difficulty=difficulty), 50)}
    except ValueError:
        assert difficulty == 1
        return
    train = {r.question for r in islice(task().rows(split="train", seed=other, difficulty=difficulty), 200)}
    assert not train & test
    assert all(split_of(q) == "test" for q in test)


@pytest.mark.processes
def test_toy_task_rows_are_the_same_in_every_process():
    rows = list(islice(Add().rows(seed=3), 20))
    assert list(islice(Add().rows(seed=3, start=7), 13)) == rows[7:]
    assert [Add().row(i, seed=3) for i in range(20)] == rows
    assert list(islice(Add().rows(seed=4), 20)) != rows
    program = (
        "from apps.toys.numbers import Add; from itertools import islice; print(list(islice(Add().rows(seed=3), 20)))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(rows)


def test_toy_task_take_returns_distinct_questions():
    rows = Add().take(300, difficulty=2)
    assert len({r.question for r in rows}) == 300
    assert rows[:50] == Add().take(50, difficulty=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"split": "dev"}, "train and test, not 'dev'"),
        ({"difficulty": 0}, "difficulty"),
        ({"difficulty": (3, 2)}, "difficulty"),
        ({"difficulty": (1, 2, 3)}, "difficulty"),
        ({"difficulty": 1001}, "difficulty"),
        ({"difficulty": True}, "difficulty"),
        ({"difficulty": 2.5}, "difficulty"),
        ({"difficulty": "hard"}, "difficulty"),
    ],
)
def test_invalid_toy_task_arguments_error_names_the_fault(call, message):
    with pytest.raises(ValueError, match=message):
        Add().rows(**call)


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


@given(text=st.text(alphabet=PRINTABLE))
def test_toy_tokenizer_round_trips_text(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    if "<" not in text:
        assert len(ids) == len(text)
