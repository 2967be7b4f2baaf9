"""The tasks for real models: answers are right, held-out questions are never trained, rules decide as people do."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from apps.real.constraints import Constraints, FollowsConstraints
from apps.real.records import Extract
from forge.rewards.rules import JsonMatch


@pytest.mark.parametrize("task", [Extract(), Constraints()])
def test_held_out_questions_are_never_trained(task):
    held = {row.question for row in task.take(200, difficulty=(1, 3))}
    trained = {row.question for row in islice(task.rows(difficulty=(1, 3)), 3000)}
    assert len(held) == 200
    assert not held & trained


def test_every_value_of_a_record_stands_in_its_sentence():
    for row in islice(Extract().rows(difficulty=(1, 4)), 500):
        sentence, request = row.question.split("\n")
        answer = json.loads(row.answer)
        assert all(str(value) in sentence for value in answer.values())
        assert request == f"Give a JSON object with the keys {', '.join(json.dumps(key) for key in answer)}."
        assert JsonMatch()(row.question, row.answer, row.answer) == 1


@pytest.mark.parametrize(
    ("response", "share"),
    [
        ("the sea keeps a cold light!", 1.0),
        ("The sea keeps a cold light!", 0.75),
        ("the sea keeps a cold light.", 0.75),
        ("the sea keeps all of its many little lights for us!", 0.5),
        ("light light light a!", 0.0),
        ("light!", 0.0),
        ("", 0.0),
    ],
)
def test_the_share_of_constraints_that_are_met(response: str, share: float):
    target = json.dumps({"most_words": 8, "lower": True, "word": "light", "end": "!"})
    assert FollowsConstraints()("", response, target) == share


def test_each_constraint_is_asked_for_in_words():
    for row in islice(Constraints().rows(difficulty=(1, 4)), 500):
        rules = json.loads(row.answer)
        assert ("at most" in row.question) == ("most_words" in rules)
        assert ("capital letters" in row.question) == ("lower" in rules)
        assert ("Use the word" in row.question) == ("word" in rules)
        assert ('End with "' in row.question) == ("end" in rules)
        assert not ("lower" in rules and rules.get("end") == "The end.")
