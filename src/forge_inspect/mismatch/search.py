"""A change to the plain forward pass that is tried, and what all of them are made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .plain import Plain
from .weights import Store, Tensors, Version

Grade = Callable[[np.ndarray], float]

NEAREST = 3  # layers, and tensors, of which parts are tried


@dataclass(frozen=True)
class Trial:
    """A change, and what it gives.

    kind: a word for tables. text: the sentence. layer: the number of the layer that it is about. by_size: the numbers
    can agree in size alone, as noise does: kernels round in another order.
    """

    kind: str
    text: str
    logprobs: np.ndarray
    layer: int | None = None
    by_size: bool = False


@dataclass(frozen=True)
class Search:
    """All that trials are made from.

    target, base: [compared] the log-probabilities to be reproduced, and those without a change. grade: returns how far
    log-probabilities are from the target.
    """

    plain: Plain
    store: Store
    target: np.ndarray
    base: np.ndarray
    grade: Grade

    @property
    def setting(self) -> Callable[[str], Any]:
        """Look up a setting of the run by its dotted key."""
        return self.store.run.settings.get

    def others(self) -> list[Version]:
        """Versions of the weights that may stand in place of the plain pass's."""
        return self.store.others(self.plain.number)

    def nearest(self, trials: Mapping[str, Trial]) -> list[str]:
        """The names of the trials whose differences point most in the direction of the target's: a part of a change
        moves the numbers as the whole does, by less."""
        gap = np.nan_to_num(self.target - self.base)

        def likeness(name: str) -> float:
            moved = trials[name].logprobs - self.base
            return abs(float(gap @ moved)) / max(float(np.linalg.norm(moved)), 1e-12)

        return sorted(trials, key=likeness, reverse=True)[:NEAREST]


def with_tensors(search: Search, kind: str, text: str, changes: Tensors) -> Trial:
    """A trial with other weights for some names."""
    layers = {layer_of(name) for name in changes}
    with search.plain.with_tensors(changes):
        return Trial(kind, text, search.plain.logprobs(), layers.pop() if len(layers) == 1 else None)


def layer_of(name: str) -> int | None:
    """The number of the layer of a tensor; None: it is of no layer."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else None


def minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of one number is smallest: the best point of a grid, refined by golden sections."""
    grid = np.linspace(low, high, 25)
    best = int(np.argmin([function(float(point)) for point in grid]))
    lower, upper = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)])
    ratio = (5**0.5 - 1) / 2
    for _ in range(20):
        first, second = upper - ratio * (upper - lower), lower + ratio * (upper - lower)
        if function(first) < function(second):
            upper = second
        else:
            lower = first
    return (lower + upper) / 2
