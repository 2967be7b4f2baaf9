"""The sides of a batch in a row, neighbours differ in one component: where they part, and why."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from forge.models.architecture import sparse_layers
from forge.models.tokenizer import model_config
from forge.system.files import write_atomic
from forge_inspect.alerts import MISMATCH

from .differences import FLIPPED, FLOAT32, HALF_TIMES, distance, mean_gap
from .layers import Part, first_part
from .plain import Plain, rounded_logprobs
from .recorded import RecordedRun, open_run
from .saved import saved_faults
from .sides import EngineSide, Side, TrainerSide
from .weights import Store

log = logging.getLogger(f"forge.{__name__}")


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
        return json.dumps(
            asdict(self) | {"links": links, "is_sound": self.is_sound, "sentence": self.sentence}, indent=1
        )


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
    return _Comparison(run, Store(run)).result(bisect)


def write(result: Mismatch, folder: Path) -> None:
    """Leave the comparison in the run's folder, where `forge watch` and `forge runs` show its fault."""
    try:
        write_atomic(folder / MISMATCH, result.json() + "\n")
    except OSError as error:  # a run of somebody else, that can be read alone
        log.info("%s could not be written: %s", folder / MISMATCH, error.strerror or error)


class _Comparison:
    def __init__(self, run: RecordedRun, store: Store) -> None:
        self.run, self.store = run, store
        self.current = store.version(run.version)
        self.owners = run.owners()
        self.config = model_config(run.start)
        self.flipped = FLIPPED if sparse_layers(self.config) else 0.0
        self.plain = Plain(run, self.current)
        self.noise = 0.0
        self.rounded: set[str] = set()
        self.values: dict[str, np.ndarray] = {}
        self.sides: dict[str, Side] = {}
        self.outcome = Mismatch(str(run.folder), run.step, run.version, len(self.owners))

    def result(self, bisect: bool) -> Mismatch:
        """Compute the sides, and name the first link that disagrees."""
        outcome = self.outcome
        outcome.faults += saved_faults(self.run, self.store)
        self._compute()
        links = self._links()
        outcome.links = links + self._further_links()
        part = [link for link in links if not link.agrees]
        further = [link for link in outcome.links[len(links) :] if not link.agrees]
        if part or further:
            self._name((part or further)[0], bisect, recorded_together=self._recorded_together(part))
            if part and further and part[0].first == RECORDED and further[0].component == SAMPLER[2]:
                outcome.notes.append("the engine's sampler does so now as well: it is not a matter of the recorded run")
        elif outcome.faults:
            outcome.component = EXPORTED
        for link in (part + further)[1:]:
            outcome.notes.append(f"also different: {link.first} and {link.second}, by {link.worst:.2g} nats")
        return outcome

    def _compute(self) -> None:
        run, tensors = self.run, self.current.tensors
        engine = EngineSide(run, run.start, tensors, run.version)
        trainer = TrainerSide(run, self.current)
        settings = run.settings
        half = [settings.get("generator.dtype") == "bfloat16", settings.get("training.dtype") == "bfloat16"]
        self.rounded = {
            *((RECORDED, "engine now, in bfloat16") if half[0] else ()),
            *((TRAINED, "trainer now, in bfloat16", REFERENCE[0]) if half[1] else ()),
        }
        if self.rounded:
            self.noise = HALF_TIMES * distance(
                rounded_logprobs(self.plain), self.plain.logprobs(), self.owners, self.flipped
            )
        self.values[RECORDED] = run.flat("engine")
        if half[0]:
            half_engine = EngineSide(run, run.start, tensors, run.version, torch.bfloat16)
            self.sides["engine now, in bfloat16"] = half_engine.cached()
        self.sides["engine now"] = engine.cached()
        self.sides["engine now, without cache"] = engine.uncached()
        self.sides["plain forward pass"] = self.plain.side()
        self.sides["trainer now, unpacked"] = trainer.unpacked()
        self.sides["trainer now, packed"] = trainer.packed()
        if half[1]:
            self.sides["trainer now, in bfloat16"] = trainer.packed(torch.bfloat16)
        self.values |= {name: side.logprobs for name, side in self.sides.items()}
        recorded = run.flat("trainer")
        if run.updates > 1:
            self.outcome.notes.append(
                f"the trainer's recorded numbers are not compared: a step has {run.updates} updates, and they are from "
                "between those"
            )
        elif np.isnan(recorded).all():
            self.outcome.notes.append(
                "the trainer's recorded numbers are not compared: step "
                f"{run.step} trained these tokens with other weights than those that sampled them"
            )
        else:
            self.values[TRAINED] = recorded
        self.engine = engine

    def _links(self) -> list[Link]:
        """Neighbours in the row from the engine's to the trainer's recorded numbers."""
        names = list(self.values)
        total = self.values[names[-1]].astype(np.float64) - self.values[names[0]]
        links = []
        for first, second in pairwise(names):
            gap = self.values[second].astype(np.float64) - self.values[first]
            usable = ~np.isnan(gap * total)
            energy = float((total[usable] ** 2).sum())
            share = float((gap * total)[usable].sum() / energy) if energy > 1e-18 else None
            links.append(self._link(first, second, COMPONENTS[first if first == RECORDED else second], share))
        return links

    def _further_links(self) -> list[Link]:
        """Links beside the row: the sampler, and the reference model."""
        reported, decoded = self.engine.sampled()
        worst = distance(reported, decoded, np.zeros(len(reported), dtype=int), self.flipped)
        links = [Link(*SAMPLER, mean_gap(reported, decoded), worst, FLOAT32)]
        reference = self.run.flat("reference")
        # Without a separate reference model the recorded numbers are the engine's.
        has_reference = any(key.startswith("services.ref_model.") for key in self.run.settings)
        if has_reference and not np.isnan(reference).all() and self.run.settings.get("grpo.reference") is None:
            start = self.store.version(0)
            with self.plain.with_tensors(start.tensors):
                computed = self.plain.logprobs()
            self.values |= {REFERENCE[0]: reference, REFERENCE[1]: computed}
            links.append(self._link(*REFERENCE, None))
        return links

    def _link(self, first: str, second: str, component: str, share: float | None) -> Link:
        first_values, second_values = self.values[first], self.values[second]
        tolerance = max(FLOAT32, self.noise if {first, second} & self.rounded else 0.0)
        worst = distance(first_values, second_values, self.owners, self.flipped)
        return Link(first, second, component, mean_gap(first_values, second_values), worst, tolerance, share)

    def _recorded_together(self, differing: Sequence[Link]) -> bool:
        """Whether the recorded numbers of engine and trainer agree with one another, and with no computation."""
        if TRAINED not in self.values or len(differing) < 2:
            return False
        outer = differing[0].first == RECORDED and differing[-1].second == TRAINED
        gap = distance(self.values[RECORDED], self.values[TRAINED], self.owners, self.flipped)
        return outer and gap <= max(FLOAT32, self.noise)

    def _name(self, link: Link, bisect: bool, recorded_together: bool) -> None:
        """Write the fault of a link: its component, and the layer."""
        outcome = self.outcome
        outcome.component = TOGETHER if recorded_together else link.component
        part = self._part(link) if bisect else None
        if part is not None:
            outcome.part, outcome.layer = part.text, part.layer
        location = f", {outcome.part}" if outcome.part else ""
        rounding = "; a product was rounded to bfloat16 there" if part is not None and part.is_rounding else ""
        gap = f"{link.first} and {link.second} differ by {link.mean:.2g} nats on average"
        outcome.faults.append(f"{outcome.component}{location}: {gap}{rounding}")

    def _part(self, link: Link) -> Part | None:
        """The first layer whose states differ between the sides of a link; None: one has no states."""
        if link.first not in self.sides or link.second not in self.sides:
            return None
        return first_part(self.sides[link.first], self.sides[link.second])


RECORDED, TRAINED = "recorded engine", "recorded trainer"
COMPONENTS = {
    RECORDED: "the engine as it sampled",
    "engine now": "the engine's dtype",
    "engine now, without cache": "the engine's cache",
    "plain forward pass": "the engine's forward pass",
    "trainer now, unpacked": "the trainer's forward pass",
    "trainer now, packed": "the trainer's packing",
    "trainer now, in bfloat16": "the trainer's dtype",
    TRAINED: "the trainer as it trained",
}
# Where what was recorded agrees, and nothing that is computed now does.
TOGETHER = "the saved weights, or the settings or the model of today"
EXPORTED = "the saved model"
SAMPLER = ("engine now, sampling", "engine now, decoding the same tokens", "the engine's sampler")
REFERENCE = ("recorded reference", "reference now", "the reference model")
