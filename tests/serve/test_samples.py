"""Many samples take turns: none of them is long, and nothing is lost between them."""

from types import SimpleNamespace

import pytest

from forge.engines.interface import extend
from forge.serve.samples import SLICE, Samples, slices
from forge.types import Completion

SIZES = [1, SLICE, 0, 5 * SLICE + 3, *[7] * 300]


@pytest.fixture
def pieces():
    return [
        (sample, Completion("", [*range(size)], [0.5] * size, versions=[3] * size, finish="stop", identities={3: "w"}))
        for sample, size in enumerate(SIZES)
    ]


def test_a_turn_is_short_and_the_turns_are_the_whole(pieces):
    turns = [*slices(pieces)]
    assert all(sum(len(piece.token_ids) for _, piece in turn) <= SLICE for turn in turns)
    assert all(len(turn) <= SLICE for turn in turns)
    wholes = [Completion() for _ in pieces]
    for sample, piece in (one for turn in turns for one in turn):
        assert not wholes[sample].finish
        extend(wholes[sample], piece)
    assert [(whole.token_ids, whole.finish) for whole in wholes] == [([*range(size)], "stop") for size in SIZES]


def test_tokens_after_a_stop_string_are_left_out(tokenizer):
    job = SimpleNamespace(stop=["cd"], sampling=SimpleNamespace(n=1))
    ids = tokenizer("abcdef", add_special_tokens=False)["input_ids"]
    samples = Samples(tokenizer, job)
    piece = Completion("", ids, [0.5] * len(ids), versions=[0] * len(ids), identities={0: ""}, finish="length")
    [(sample, text, taken, finish)] = samples.decode([(0, piece)])
    assert (sample, text, taken.token_ids, finish, samples.running) == (0, "ab", ids[:4], "stop", set())
    assert [*samples.decode([(0, piece)])] == []
