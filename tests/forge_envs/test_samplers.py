"""Samplers: which rows come next, by what came of those before."""

from collections import Counter

import pytest

from forge.data.sampler import Sampler, make_sampler
from forge.data.sources import SampledRows
from forge_envs.samplers import Curriculum, Frontier, Retire

ROWS = [{"question": f"q{number}", "level": number // 4, "kind": ["even", "odd"][number % 2]} for number in range(12)]


def drawn(sampler, count):
    return [sampler.draw() for _ in range(count)]


def test_curriculum_sampler_advances_when_level_is_solved():
    sampler = Curriculum(ROWS, 0, advance_at=0.75, window=4)
    assert {ROWS[row]["level"] for row in drawn(sampler, 40)} == {0}
    for rewards in ([1.0, 0.0], [1.0, 1.0], [1.0, 1.0]):
        sampler.observe(0, rewards)
    assert ROWS[sampler.draw()]["level"] == 0  # the window is not full
    sampler.observe(1, [1.0, 1.0])
    assert {ROWS[row]["level"] for row in drawn(sampler, 40)} == {1}
    for _ in range(20):
        sampler.observe(2, [1.0])  # of the level before
    assert ROWS[sampler.draw()]["level"] == 1
    for _ in range(8):
        sampler.observe(5, [1.0])
    for _ in range(8):
        sampler.observe(9, [1.0])
    assert ROWS[sampler.draw()]["level"] == 2  # the last one stays


def test_frontier_sampler_prefers_rows_solved_in_some_samples():
    sampler = Frontier(ROWS, 0, floor=0.01)
    for _ in range(10):
        for row in range(12):
            sampler.observe(row, [1.0, 1.0] if row < 5 else [0.0, 0.0] if row < 10 else [1.0, 0.0])
    counts = Counter(drawn(sampler, 2000))
    # p (1 - p) is .25 for two rows and 0 for ten, each with .01 more: the two get .52 of .62.
    assert sum(counts[row] for row in (10, 11)) / 2000 == pytest.approx(0.52 / 0.62, abs=0.04)
    assert len(counts) == 12


@pytest.mark.parametrize(
    ("use", "state"),
    [
        ({"use": "curriculum", "window": 1}, {"sampler/level": 2}),
        ("frontier", {"sampler/solved": 0.75}),
        ("retire", {"sampler/retired": 1}),
        (Sampler, {}),
    ],
)
def test_sampler_state_is_recorded_as_metrics(use, state, monkeypatch):
    recorded = {}
    monkeypatch.setattr("forge.data.sources.record_metric", recorded.__setitem__)
    monkeypatch.setattr(Sampler, "__abstractmethods__", frozenset())
    source = SampledRows(ROWS[:8], use, seed=0)
    source.sampler.draw = lambda: 0
    source.read()
    source.issue(0)
    source.observe({0: [1.0, 1.0]})
    assert recorded == state


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: Curriculum(rows, 3, window=2, advance_at=0.5),
        lambda rows: Frontier(rows, 3),
        lambda rows: Retire(rows, 3),
    ],
)
def test_resumed_row_sampler_returns_the_same_rows(make):
    """Whatever was drawn and observed before, and with outcomes that are known only later."""

    def play(source, first, last):
        rows = []
        for index in range(first, last):
            number, _ = source.read()
            source.issue(index)
            rows.append(number)
            if index % 3 == 2:  # three at once, of which the newest is still in flight
                source.observe({done: [float(numbers[done] % 2)] for done in range(index - 4, index) if done >= 0})
            numbers[index] = number
        return rows

    numbers = {}
    whole = SampledRows(ROWS, lambda rows, seed: make(rows), seed=3)
    expected = play(whole, 0, 120)
    for cut in (1, 20, 61, 100):
        numbers = {}
        source = SampledRows(ROWS, lambda rows, seed: make(rows), seed=3)
        play(source, 0, cut)
        resumed = SampledRows(ROWS, lambda rows, seed: make(rows), seed=3)
        resumed.load(source.state())
        assert play(resumed, cut, 120) == expected[cut:]


@pytest.mark.parametrize(
    ("sampler", "problem"),
    [
        ("easy", "sampler '(?i:easy)' was not found"),
        ({"name": "retire"}, "must have `use: "),
        ({"use": "retire", "time": 2}, "unknown key 'dataset.sampler.time'; did you mean 'times'"),
        ({"use": "curriculum", "level": "hardness"}, "row 1 has no hardness: it has question, level, kind"),
        ({"use": "frontier", "floor": 0.0}, "floor must be above 0"),
        (lambda rows, seed: object(), "has no method draw, observe"),
    ],
)
def test_invalid_row_sampler_settings_raise(sampler, problem):
    with pytest.raises(ValueError, match=problem) as caught:
        make_sampler(sampler, ROWS, 0)
    assert "\n" not in str(caught.value)
