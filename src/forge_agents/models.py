"""The section `models` of the RL recipe: what agents may ask alongside the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import PositiveFloat

from forge.config.sections import ConfigError, Section, build
from forge.observability.metrics import METRICS_OF
from forge.recipes.components import POLICY
from forge.runtime.controller import Options
from forge_envs.calls import Syntax

if TYPE_CHECKING:
    from forge.recipes.rl_config import RLConfig


class FurtherModel(Section):
    """A model that agents ask by its name: frozen, trained as well, or another seat of a trained one."""

    model: str | None = None
    """Its folder or hub id; null: the run's, as it is at the start."""
    trains: bool = False
    """Train it too, in recipes for several policies such as `apps.selfplay.main`."""
    seat_of: str | None = None
    """It is this trained model under another name, so that each side of a game has an episode and a reward."""
    temperature: PositiveFloat = 1.0
    """Of a frozen one; one that trains samples as the policy does."""
    template: bool | str = True
    """Of a frozen one, like `episode.template`."""
    syntax: Syntax | None = None
    """Of a frozen one, like `episode.syntax`."""
    generator: Options = Options()
    """Placement of its generators."""
    trainer: Options = Options()
    """Placement of its trainer."""
    critic: Options = Options()
    """Placement of its critic, where the algorithm has one."""
    ref_model: Options = Options()
    """Placement of its reference model: its own start, where the run has a reference and `grpo.reference` names none.
    One that starts as the run's own policy shares the reference of that."""

    @property
    def is_frozen(self) -> bool:
        """Return whether this run samples from it and does not train it."""
        return not self.trains and self.seat_of is None

    @property
    def parts(self) -> list[str]:
        """Return the names of the services that the run starts for it."""
        if self.trains:
            return ["generator", "trainer"]
        return ["generator"] if self.is_frozen else []


def place_part(further: FurtherModel, name: str, part: str) -> dict[str, Any]:
    """Return the options of an additional model's part, whose name and metrics start with the model's."""
    options = further[part]
    return {**options, "mesh_name": options.mesh_name or f"{name}_{part}", "env": {METRICS_OF: name, **options.env}}


def place_models(cfg: RLConfig) -> dict[str, dict[str, Any]]:
    """Return the options of all that a run starts for its additional models, by their settings."""
    return {
        f"models.{name}.{part}": place_part(further, name, part)
        for name, further in cfg.models.items()
        for part in [*further.parts, *(scoring_parts(cfg, further) if further.trains else ())]
    }


def scoring_parts(cfg: RLConfig, further: FurtherModel) -> list[str]:
    """Return the critic and the reference model of an additional policy, as far as it has its own."""
    # Compared as they are written: folders are resolved later, and placements are needed before.
    has_own_start = cfg.grpo.reference is None and further.model not in (None, cfg.model)
    needed = {"critic": True, "ref_model": has_own_start}
    return [part for part, is_needed in needed.items() if is_needed and part not in cfg.idle]


def check_models(cfg: RLConfig) -> dict[str, FurtherModel]:
    """Build the section `models` of a configuration.

    Raises:
        ConfigError: names or settings that do not work.
    """
    trains_several = getattr(cfg, "trains_several", False)  # see forge_agents.several
    models = {
        name: further if isinstance(further, FurtherModel) else build(FurtherModel, further, f"models.{name}")
        for name, further in cfg.models.items()
    }
    for name, further in models.items():
        path = f"models.{name}"
        if name == POLICY or not name.replace("-", "_").isidentifier():
            reason = "is the run's model" if name == POLICY else "must be of letters, digits, - and _"
            raise ConfigError(f"{path}: {name!r} {reason}")
        if further.trains and further.seat_of is not None:
            raise ConfigError(f"{path}.trains and {path}.seat_of contradict each other: set one of them")
        if further.seat_of is not None and further.seat_of not in trained_models(models):
            names = ", ".join(trained_models(models))
            raise ConfigError(f"{path}.seat_of: {further.seat_of!r} is not trained here: name one of {names}")
        if (further.trains or further.seat_of is not None) and not trains_several:
            raise ConfigError(f"{path}: this recipe trains one policy; use apps.selfplay.main or a loop like it")

    return models


def trained_models(models: dict[str, FurtherModel]) -> list[str]:
    """Return the names of the trained models, the run's own first."""
    return [POLICY, *(name for name, further in models.items() if further.trains)]


def seats(models: dict[str, FurtherModel]) -> dict[str, str]:
    """Return the trained model that plays under each name whose turns become episodes."""
    trained = {name: name for name in trained_models(models)}
    return trained | {name: further.seat_of for name, further in models.items() if further.seat_of is not None}
