"""Mixtures: every source's share at every moment, and positions in all of them."""

import json
from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given, strategies as st

from forge.data.load import Mixture, load_data
from tests.data.rows import TOKENIZER

SOURCES = [
    {"task": "apps.toys.numbers:Add", "weight": 3},
    {"task": "apps.toys.words:Sort", "weight": 1.5},
    {"task": "apps.toys.numbers:Gcd", "difficulty": 3, "seed": 7},
]


class Named:
    """Its items are (name, 0), (name, 1), ... up to an end."""

    def __init__(self, name: str, end: float = float("inf")) -> None:
        self.name, self.at, self.end, self.skipped = name, 0, end, 2

    def __next__(self) -> tuple[str, int]:
        if self.at >= self.end:
            raise StopIteration
        self.at += 1
        return self.name, self.at - 1


@given(weights=st.lists(st.integers(1, 50) | st.floats(0.01, 100), min_size=1, max_size=9))
def test_mixture_samples_stay_within_one_row_of_source_shares(weights):
    mixture = Mixture([Named(str(i)) for i in range(len(weights))], weights)
    shares = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    counts = [0] * len(weights)
    for k, (name, place) in enumerate(islice(mixture, 200), 1):
        assert place == counts[int(name)]
        counts[int(name)] += 1
        assert all(abs(count - share * k) < 1 for count, share in zip(counts, shares, strict=True))


def test_dataset_mixture_ends_with_first_exhausted_source():
    mixture = Mixture([Named("a"), Named("b", end=2)], [2, 1])
    assert [name for name, _ in mixture].count("b") == 2
    assert (mixture.skipped, mixture.served) == (4, 7)


@pytest.mark.parametrize("kind", ["prompts", "supervised", "preferences"])
def test_dataset_mixture_resumes_at_every_position(kind):
    def new():
        return load_data(TOKENIZER, kind=kind, sources=SOURCES, seed=2, prompt_template="{question}=")

    data, states, items = new(), [], []
    for _ in range(40):
        states.append(json.dumps(data.state_dict()))
        items.append(next(data))
    for position in range(0, 40, 3):
        resumed = new()
        resumed.load_state_dict(json.loads(states[position]))
        assert list(islice(resumed, 40 - position)) == items[position:]
        assert json.dumps(new().state_dict()) == states[0]
    if kind == "prompts":
        assert [sample.prompt.index for sample in items] == list(range(40))
        assert sum("+" in str(sample.prompt) for sample in items) == pytest.approx(40 * 3 / 5.5, abs=1)


def test_held_out_rows_of_mixture_keep_source_shares():
    data, other = (load_data(TOKENIZER, sources=SOURCES) for _ in "ab")
    first = list(islice(data, 5))
    held = data.held_out(110)
    assert [sample.prompt.index for sample in held] == list(range(110))
    assert sum("+" in str(sample.prompt) for sample in held) == 60
    assert len({str(sample.prompt) for sample in held}) == 110
    assert data.held_out(110) == held
    assert first + list(islice(data, 20)) == list(islice(other, 25))


def test_mixture_source_settings_override_common_settings(jsonl):
    path = jsonl({"q": "one", "a": "1"}, {"q": "two", "a": "2"})
    file = {"path": path, "prompt_field": "q", "target_field": "a", "weight": 1}
    data = load_data(
        TOKENIZER, sources=[file, {"task": "apps.toys.numbers:Add", "weight": 1}], prompt_template="{question}="
    )
    assert {str(sample.prompt) for sample in islice(data, 20)} >= {"one=", "two="}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sources": []}, "needs at least one source"),
        (
            {"sources": [{"task": "apps.toys.numbers:Add"}, {"task": "add"}]},
            "source 2: unknown task 'add': write it as package.module:Name",
        ),
        ({"sources": [{"task": "apps.toys.numbers:Add", "wieght": 2}]}, "source 1: .*'wieght'"),
        (
            {"sources": [{"task": "apps.toys.numbers:Add"}, {"task": "apps.toys.numbers:Add", "weight": 0}]},
            "source 2: weight must be .* above 0, got 0",
        ),
        ({"sources": [{"task": "apps.toys.numbers:Add", "weight": "2"}]}, "source 1: weight must be .* got '2'"),
        (
            {"sources": [{"task": "apps.toys.numbers:Add"}], "task": "apps.toys.numbers:Add"},
            "set path or task in each source",
        ),
        (
            {"kind": "preference", "task": "apps.toys.numbers:Add"},
            "kind must be one of prompts, supervised, preferences, not 'pref",
        ),
    ],
)
def test_invalid_mixture_error_names_the_fault(settings, message):
    with pytest.raises(ValueError, match=message):
        load_data(TOKENIZER, **settings)


def test_mixture_state_with_other_source_weights_raises():
    state = load_data(TOKENIZER, sources=SOURCES).state_dict()
    for sources in (SOURCES[:2], [{**SOURCES[0], "weight": 4}, *SOURCES[1:]]):
        with pytest.raises(ValueError, match="data position is of a mixture with shares"):
            load_data(TOKENIZER, sources=sources).load_state_dict(state)
    with pytest.raises(ValueError, match="seed 0, but it is 1 now"):
        load_data(TOKENIZER, sources=SOURCES, seed=1).load_state_dict(state)
