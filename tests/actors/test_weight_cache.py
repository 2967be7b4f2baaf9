"""How versions reach a host: as patches or whole."""

from __future__ import annotations

import pytest

from forge.actors.weight_cache import REMEASURED, Pace


def ways(pace: Pace, count: int, patch: float, whole: float) -> list[bool]:
    """Whether each of so many versions came as a patch, which takes so many seconds; the first has no base."""
    chosen = []
    for number in range(count):
        is_patch = pace.prefers_patch() and number > 0
        pace.add(is_patch, patch if is_patch else whole, 1000)
        chosen.append(is_patch)
    return chosen


@pytest.mark.parametrize(("patch", "whole", "quicker"), [(1.0, 2.0, True), (2.0, 1.0, False)])
def test_the_quicker_way_is_taken_and_the_other_one_measured_again(patch: float, whole: float, quicker: bool):
    chosen = ways(Pace("auto"), 2 + 3 * REMEASURED, patch, whole)
    assert chosen[:2] == [False, True]  # both are measured
    rest = chosen[2:]
    assert rest.count(quicker) == len(rest) - 3
    assert [number for number, is_patch in enumerate(chosen) if number > 1 and is_patch != quicker] == [
        REMEASURED,
        2 * REMEASURED,
        3 * REMEASURED,
    ]


def test_a_network_that_becomes_slow_is_noticed():
    pace = Pace("auto")
    assert not ways(pace, 10, 2.0, 1.0)[-1]
    assert ways(pace, REMEASURED, 2.0, 5.0)[-1]


def test_always_and_never_are_what_they_say():
    assert ways(Pace("always"), 50, 9.0, 1.0) == [False, *[True] * 49]
    assert not any(ways(Pace("never"), 50, 1.0, 9.0))
