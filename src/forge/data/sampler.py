"""Samplers choose the order of stored rows by the answers to earlier ones. `dataset.sampler` names one.

A sampler is constructed with the rows and a seed, returns which row comes next (`draw`), and learns which answers of
each group are right (`observe`). Its state is a part of every checkpoint, so that a resumed run draws the same rows.
`forge_envs.samplers` has three.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from ..config.plugin import construct, resolve
from .files import Row

HOME = "forge_envs.samplers"  # the module of samplers that are named without one
METHODS = ("draw", "observe", "state_dict", "load_state_dict")


class Sampler(ABC):
    """Base class of row samplers, which choose the next dataset row. A subclass may have a method `metrics() ->
    dict[str, float]`: numbers that describe its state, for the metrics `sampler/NAME`.

    Args:
        rows: all of them; rows are named by their position.
        seed: of the run.
    """

    def __init__(self, rows: Sequence[Row], seed: int) -> None:
        self.rows, self.seed = rows, seed
        self.draws = 0

    def random(self) -> Random:
        """Return a new random generator for one draw, seeded by the run's seed and the number of the draw, so that no
        generator's state has to be saved."""
        self.draws += 1
        return Random(f"{self.seed}/{self.draws}")

    @abstractmethod
    def draw(self) -> int:
        """Return the position of the next row, from 0."""

    def observe(self, row: int, outcomes: Sequence[float]) -> None:
        """Update the sampler by the outcomes of a row's group of answers; the base class ignores the outcomes.

        Args:
            row: its position. Groups of one training step come in the order of their draws.
            outcomes: for each answer 1.0 if it is right, as `reward.accuracy` or the environment says, else 0.0; empty
                if none could be judged.
        """
        del row, outcomes

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state as plain JSON: all attributes except `rows`, `seed` and private ones."""
        return {name: value for name, value in vars(self).items() if name not in ("rows", "seed") and name[0] != "_"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        vars(self).update(state)


def make_sampler(sampler: Any, rows: Sequence[Row], seed: int) -> Any:
    """Return the sampler that the setting `dataset.sampler` describes, with the methods of `Sampler`.

    Args:
        sampler: a name (curriculum, frontier, retire, or `package.module:Class`), `{use: name, <settings>}`, or a
            class or function that takes rows and a seed.

    Raises:
        ValueError: it is unknown, its settings do not fit, or it does not have all methods.
    """
    settings = dict(sampler) if isinstance(sampler, Mapping) else {"use": sampler}
    use = settings.pop("use", None)
    if isinstance(use, str):
        use = resolve(use if ":" in use else use.capitalize(), "sampler", HOME)
    if not callable(use):
        raise ValueError(f"dataset.sampler must have `use: name` or `use: package.module:Class`, got {sampler!r}")

    # Settings are checked by names and types, as rewards' are.
    built = construct(use, {"rows": rows, "seed": seed, **settings}, "dataset.sampler")
    missing = [name for name in METHODS if not hasattr(built, name)]
    if missing:
        raise ValueError(f"dataset.sampler has no method {', '.join(missing)}: implement forge.data.sampler.Sampler")
    return built
