"""The data set as an actor: what it takes, and what it rejects before a process starts."""

import pytest

from forge.actors import DatasetActor
from forge.config import ConfigError

ROWS = [{"question": "ab", "answer": "ba"}]


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((ROWS,), {}, "the first argument of DatasetActor must be a model"),
        (("model",), {}, "set exactly one of dataset.path"),
        (("model", ROWS), {"promt_template": "{question}"}, "promt_template.*prompt_template"),
        (("model", [1, 2]), {}, "row 1 is 1, but a row must be a mapping"),
        (("model", ROWS), {"kind": "pairs"}, "kind must be one of"),
    ],
)
def test_invalid_dataset_actor_arguments_raise(arguments, settings, message):
    with pytest.raises((ValueError, ConfigError), match=message):
        DatasetActor(*arguments, **settings)


def test_dataset_actor_accepts_in_memory_rows_and_stream_settings():
    actor = DatasetActor("model", ROWS, prompt_template="{question}>", seed=3, epochs=1, checked=True)
    assert list(actor.settings["path"]) == ROWS
