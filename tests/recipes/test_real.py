"""The tasks for real models: answers are right, held-out questions are never trained, rules decide as people do."""

import json
from itertools import islice

import pytest

from apps.real.constraints import Constraints, FollowsConstraints
from apps.real.records import Extract


@pytest.mark.parametrize("task", [Extract(), Constraints()])
def test_extraction_and_constraint_tasks_do_not_train_held_out_questions(task):
    held = {row.question for row in task.take(200, difficulty=(1, 3))}
    trained = {row.question for row in islice(task.rows(difficulty=(1, 3)), 3000)}
    assert len(held) == 200
    assert not held & trained


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
def test_constraint_task_reward_is_share_of_constraints_met(response: str, share: float):
    target = json.dumps({"most_words": 8, "lower": True, "word": "light", "end": "!"})
    assert FollowsConstraints()("", response, target) == share
