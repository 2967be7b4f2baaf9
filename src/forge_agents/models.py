"""The section `models` of the RL recipe: models that agents may ask in addition to the policy."""

from typing import Any

from pydantic import PositiveFloat

from forge.config.sections import ConfigError, Section, build
from forge.observability.metrics import METRICS_OF
from forge.recipes.components import POLICY
from forge.recipes.rl_config import RLConfig
from forge.runtime.controller import Options
from forge_envs.calls import Syntax


class FurtherModel(Section):
    """Additional model that agents request by name: frozen, trained, or a trained model under a second name."""

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
        """Return whether the run only samples from the model: it is neither trained nor a trained one's second name."""
        return not self.trains and self.seat_of is None

    @property
    def parts(self) -> list[str]:
        """Return the services that the run always starts for the model: "generator" and, if it trains, "trainer"."""
        if self.trains:
            return ["generator", "trainer"]
        return ["generator"] if self.is_frozen else []


def place_part(model_config: FurtherModel, name: str, part: str) -> dict[str, Any]:
    """Return the placement options of one of an additional model's services.

    The service's name and its metrics start with the model's name, so that they differ from the run's own.

    Args:
        name: the model's name.
        part: the service, "generator", "trainer", "critic" or "ref_model".
    """
    options = model_config[part]
    return {**options, "mesh_name": options.mesh_name or f"{name}_{part}", "env": {METRICS_OF: name, **options.env}}


def place_models(cfg: RLConfig) -> dict[str, dict[str, Any]]:
    """Return the placement options of all services of the additional models, keyed by their settings.

    Such as {"models.rival.trainer": {"procs": 1, ...}}.
    """
    return {
        f"models.{name}.{part}": place_part(model_config, name, part)
        for name, model_config in cfg.models.items()
        for part in [*model_config.parts, *scoring_parts(cfg, model_config)]
    }


def scoring_parts(cfg: RLConfig, model_config: FurtherModel) -> list[str]:
    """Return which of "critic" and "ref_model" the run starts for an additional model; none if it does not train.

    A critic only if the algorithm needs one. A reference model only if the algorithm needs one and the policy starts
    from other weights than the run's own policy, whose reference it would otherwise share.
    """
    if not model_config.trains:
        return []
    # Compared as they are written in the configuration: placements are needed before folders are resolved.
    has_own_start = cfg.grpo.reference is None and model_config.model not in (None, cfg.model)
    needed = ["critic", "ref_model"] if has_own_start else ["critic"]
    return [part for part in needed if part not in cfg.idle]


def check_models(cfg: RLConfig) -> dict[str, FurtherModel]:
    """Build and check the section `models` of a configuration, and return it by the models' names.

    Raises:
        ConfigError: a name or a setting is invalid, or the recipe cannot train several policies.
    """
    trains_several = getattr(cfg, "trains_several", False)  # see forge_agents.several
    models = {
        name: values if isinstance(values, FurtherModel) else build(FurtherModel, values, f"models.{name}")
        for name, values in cfg.models.items()
    }
    trained = trained_models(models)
    for name, model_config in models.items():
        path = f"models.{name}"
        seat_of = model_config.seat_of
        for is_right, problem in (
            (name != POLICY, f"{path}: {name!r} is the run's model"),
            (name.replace("-", "_").isidentifier(), f"{path}: {name!r} must be of letters, digits, - and _"),
            (
                not model_config.trains or seat_of is None,
                f"{path}.trains and {path}.seat_of contradict each other: set one of them",
            ),
            (
                seat_of is None or seat_of in trained,
                f"{path}.seat_of: {seat_of!r} is not trained here: name one of {', '.join(trained)}",
            ),
            (
                model_config.is_frozen or trains_several,
                f"{path}: this recipe trains one policy; use apps.selfplay.main or a loop like it",
            ),
        ):
            if not is_right:
                raise ConfigError(problem)

    return models


def trained_models(models: dict[str, FurtherModel]) -> list[str]:
    """Return the names of the models that train, starting with "policy", the run's own."""
    return [POLICY, *(name for name, model_config in models.items() if model_config.trains)]


def seats(models: dict[str, FurtherModel]) -> dict[str, str]:
    """Return {seat: trained model} for the names (roles) under which trained models play and whose turns become
    episodes.

    A trained model plays under its own name, and under each name that has it as `seat_of`. Frozen models have none.
    """
    own_names = {name: name for name in trained_models(models)}
    second_names = {
        name: model_config.seat_of for name, model_config in models.items() if model_config.seat_of is not None
    }
    return own_names | second_names
