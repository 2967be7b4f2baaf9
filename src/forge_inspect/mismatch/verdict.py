"""The sides of a batch in a row, neighbours differ in one component: where they part, and by how much."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forge.models.architecture import sparse_layers
from forge.models.tokenizer import model_config

from .recorded import RecordedRun, open_run, read_policy
from .sides import EngineSide, PlainSide, Side, TrainerSide

# Nats, mean over the tokens of the sequence that differs most. Between engine, trainer and transformers in float32 tiny
# models of seven families differ by at most 2.5e-6 on a CPU; larger ones add up more terms, and are not measured.
FLOAT32 = 1e-4
# Several times the noise of half precision, measured on the same batch: two kernels round differently.
HALF_TIMES = 3.0
# A share of the tokens of a mixture of experts may flip between experts that are almost tied.
FLIPPED = 0.02
# Relative to the norm of the states. In float32 states of engine, trainer and transformers differ by at most 8e-7 of it
# (tiny models), and one product that is rounded to bfloat16 moves them by 6e-4.
STATES = 2e-5
HALF = (3e-4, 2e-2)  # from one product of a layer to all of them

RECORDED, TRAINED = "recorded engine", "recorded trainer"
HALF_ENGINE, HALF_TRAINER = "engine now, in bfloat16", "trainer now, in bfloat16"
# By the second side of a pair, but for the first pair.
COMPONENTS = {
    RECORDED: "the engine as it sampled",
    "engine now": "the engine's dtype",
    "engine now, without cache": "the engine's cache",
    "plain forward pass": "the engine's forward pass",
    "trainer now, unpacked": "the trainer's forward pass",
    "trainer now, packed": "the trainer's packing",
    HALF_TRAINER: "the trainer's dtype",
    TRAINED: "the trainer as it trained",
}
# Where what was recorded agrees, and nothing that is computed now does.
TOGETHER = "the saved weights, or the settings or the model of today"


@dataclass(frozen=True)
class Link:
    """Two neighbouring sides, and the component in which they differ.

    mean: of |difference| over all tokens, in nats. worst: the mean of the sequence in which it is largest, which is
    compared with the tolerance. share: the part that this link has in the whole difference of engine and trainer; the
    shares of a row add up to 1, and those of links that cancel each other are negative.
    """

    first: str
    second: str
    component: str
    mean: float
    worst: float
    tolerance: float
    share: float | None = None

    @property
    def agrees(self) -> bool:
        """Whether the two differ by rounding alone."""
        return self.worst <= self.tolerance


@dataclass
class Mismatch:
    """The result of a comparison.

    component, layer, part: of the first link that disagrees; the layer and the place where states of layers begin to
    differ (with `bisect`). None, and empty texts: there is none.
    """

    run: str
    step: int
    version: int
    tokens: int
    links: list[Link] = field(default_factory=list)
    component: str = ""
    layer: int | None = None
    part: str = ""
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether engine and trainer compute the same."""
        return not self.faults

    @property
    def sentence(self) -> str:
        """The verdict in one sentence, for a page beside `train/engine_difference`."""
        if self.is_sound:
            return f"engine and trainer agree on {self.tokens} tokens of version {self.version}"
        return self.faults[0]

    def json(self) -> str:
        """The comparison as JSON."""
        links = [asdict(link) | {"agrees": link.agrees} for link in self.links]
        verdict = {"links": links, "is_sound": self.is_sound, "sentence": self.sentence}
        return json.dumps(asdict(self) | verdict, indent=1)


def compare(folder: Path, *, step: int | None = None, bisect: bool = False) -> Mismatch:
    """Compare engine and trainer on a recorded batch of a run.

    Args:
        step: whose batch; None: the newest one that can be compared.
        bisect: walk the states of the layers to the first that differs.

    Raises:
        FileNotFoundError: not a run that has made a step.
        ValueError: there is nothing to compare; in one line.
    """
    run = open_run(folder, step)
    outcome = Mismatch(str(folder), run.step, run.version, len(run.owners()))
    sides, noise = _compute_sides(run)
    values = {RECORDED: run.flat("engine"), **{name: side.logprobs for name, side in sides.items()}}
    recorded = run.flat("trainer")
    if run.updates > 1:
        reason = f"a step has {run.updates} updates, and they are from between those"
        outcome.notes.append(f"the trainer's recorded numbers are not compared: {reason}")
    elif np.isnan(recorded).all():
        reason = f"step {run.step} trained these tokens with other weights than those that sampled them"
        outcome.notes.append(f"the trainer's recorded numbers are not compared: {reason}")
    else:
        values[TRAINED] = recorded

    outcome.links = _link_sides(run, values, noise)
    if differing := [link for link in outcome.links if not link.agrees]:
        link = differing[0]
        outcome.component = link.component
        if len(differing) > 1 and link.first == RECORDED and differing[-1].second == TRAINED:
            between = _link(run, RECORDED, TRAINED, TOGETHER, values, noise)
            outcome.component = TOGETHER if between.agrees else link.component
        location = ""
        if bisect and link.first in sides and link.second in sides:
            outcome.part, outcome.layer, size = find_part(sides[link.first], sides[link.second])
            rounding = "; a product was rounded to bfloat16 there" if HALF[0] < size < HALF[1] else ""
            location = f", {outcome.part}{rounding}"
        gap = f"{link.first} and {link.second} differ by {link.mean:.2g} nats on average"
        outcome.faults.append(f"{outcome.component}{location}: {gap}")
        outcome.notes += [f"also different: {x.first} and {x.second}, by {x.worst:.2g} nats" for x in differing[1:]]
    return outcome


def _compute_sides(run: RecordedRun) -> tuple[dict[str, Side], dict[str, float]]:
    """The sides that are computed now, in the order of the row, and by name the noise of those in half precision."""
    policy, tensors = read_policy(run)
    engine, plain, trainer = EngineSide(run, tensors), PlainSide(run, tensors), TrainerSide(run, policy)
    in_half = [run.settings.get(f"{section}.dtype") == "bfloat16" for section in ("generator", "training")]
    sides = {HALF_ENGINE: EngineSide(run, tensors, torch.bfloat16).cached()} if in_half[0] else {}
    sides |= {
        "engine now": engine.cached(),
        "engine now, without cache": engine.uncached(),
        "plain forward pass": plain.side(),
        "trainer now, unpacked": trainer.unpacked(),
        "trainer now, packed": trainer.packed(),
    }
    if in_half[1]:
        sides[HALF_TRAINER] = trainer.packed(torch.bfloat16)
    noise = 0.0
    if any(in_half):
        noise = HALF_TIMES * distance(run, plain.side(torch.bfloat16).logprobs, sides["plain forward pass"].logprobs)
    pairs = ((RECORDED, HALF_ENGINE), (TRAINED, HALF_TRAINER))
    return sides, {name: noise for pair, is_half in zip(pairs, in_half, strict=True) if is_half for name in pair}


def _link_sides(run: RecordedRun, values: Mapping[str, np.ndarray], noise: Mapping[str, float]) -> list[Link]:
    """Link neighbours in the row from the engine's to the trainer's recorded numbers."""
    names = list(values)
    total = values[names[-1]].astype(np.float64) - values[names[0]]
    links = []
    for first, second in pairwise(names):
        gap = values[second].astype(np.float64) - values[first]
        usable = ~np.isnan(gap * total)
        energy = float((total[usable] ** 2).sum())
        share = float((gap * total)[usable].sum() / energy) if energy > 1e-18 else None
        component = COMPONENTS[first if first == RECORDED else second]
        links.append(_link(run, first, second, component, values, noise, share))
    return links


def _link(
    run: RecordedRun,
    first: str,
    second: str,
    component: str,
    values: Mapping[str, np.ndarray],
    noise: Mapping[str, float],
    share: float | None = None,
) -> Link:
    # The mean is that of `train/engine_difference`.
    mean = float(np.nanmean(np.abs(values[first].astype(np.float64) - values[second])))
    tolerance = max(FLOAT32, noise.get(first, 0.0), noise.get(second, 0.0))
    return Link(first, second, component, mean, distance(run, values[first], values[second]), tolerance, share)


def distance(run: RecordedRun, first: np.ndarray, second: np.ndarray) -> float:
    """Mean absolute difference, in nats, of the sequence in which it is largest.

    Args:
        first, second: [compared] log-probabilities; tokens with NaN in one of them are left aside.
    """
    gaps = np.abs(first.astype(np.float64) - second)
    usable = ~np.isnan(gaps)
    if sparse_layers(model_config(run.start)) and usable.any():
        usable &= ~(gaps > np.quantile(gaps[usable], 1 - FLIPPED))
    if not usable.any():
        return 0.0
    owners = run.owners()[usable]
    return float((np.bincount(owners, gaps[usable]) / np.maximum(np.bincount(owners), 1)).max())


def find_part(first: Side, second: Side) -> tuple[str, int | None, float]:
    """Walk from the embedding to the head: the place where states begin to differ, its layer (None for the embedding
    and the head), and by how much of their norm."""
    places: list[tuple[Tensor, Tensor, str, int | None]] = [(first.states[0], second.states[0], "the embedding", None)]
    for layer in range(len(first.attended)):
        after = f"layer {layer}, output projection, norms or feed-forward"
        places.append((first.attended[layer], second.attended[layer], f"layer {layer}, attention", layer))
        places.append((first.states[layer + 1], second.states[layer + 1], after, layer))
    for state, second_state, name, place in places:
        size = float((state - second_state).norm() / second_state.norm().clamp(min=1e-30))
        if size > STATES:
            return f"{name} (its states differ by {size:.1e} of their norm)", place, size
    return "the last norm or the head (the states of all layers agree)", None, 0.0
