"""The first layer whose states differ between two sides."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .sides import Side

# Relative to the norm of the states. In float32 states of engine, trainer and transformers differ by at most 8e-7 of it
# (tiny models), and one product that is rounded to bfloat16 moves them by 6e-4.
STATES = 2e-5
HALF = (3e-4, 2e-2)  # from one product of a layer to all of them


@dataclass(frozen=True)
class Part:
    """The place where states begin to differ, and by how much of their norm.

    layer: None for the embedding and the head.
    """

    text: str
    layer: int | None
    size: float

    @property
    def is_rounding(self) -> bool:
        """Whether the difference has the size of rounding to bfloat16."""
        return HALF[0] < self.size < HALF[1]


def first_part(first: Side, second: Side) -> Part | None:
    """Walk from the embedding to the head; None: there is nothing to walk."""
    if not first.states or len(first.states) != len(second.states):
        return None
    if (size := relative(first.states[0], second.states[0])) > STATES:
        return Part(f"the embedding (its states differ by {size:.1e} of their norm)", None, size)
    for layer, (state, second_state) in enumerate(zip(first.states[1:], second.states[1:], strict=True)):
        inner = relative(first.attended[layer], second.attended[layer])
        if inner > STATES:
            return _part(layer, "attention", inner)
        if (size := relative(state, second_state)) > STATES:
            return _part(layer, "output projection, norms or feed-forward", size)
    return Part("the last norm or the head (the states of all layers agree)", None, 0.0)


def relative(first: Tensor, second: Tensor) -> float:
    """The norm of the difference over that of the second."""
    return float((first - second).norm() / second.norm().clamp(min=1e-30))


def _part(layer: int, inside: str, size: float) -> Part:
    words = f"layer {layer}, {inside} (its states differ by {size:.1e} of their norm"
    return Part(words + ")", layer, size)
