"""Losses and gradients that TRL and verl computed, see benchmarks/losses_peers.py."""

import json

import pytest

from benchmarks.losses import PEERS, differences

FOUND = differences(json.loads(PEERS.read_text()))


@pytest.mark.parametrize(("library", "case"), FOUND)
def test_losses_and_gradients_match_other_rl_libraries(library: str, case: str):
    for what, difference in FOUND[library, case].items():
        assert difference <= 1e-6, what
