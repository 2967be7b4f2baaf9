"""The section `models` of the RL recipe: what agents may ask beside the policy."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from pydantic import PositiveFloat

from ..config.sections import ConfigError, Section
from ..envs.calls import Syntax
from ..observability.metrics import METRICS_OF
from ..runtime.controller import Options

POLICY = "policy"  # the name by which agents ask for the run's `model`


class FurtherModel(Section):
    """A model that agents ask by its name: frozen, trained as well, another seat of a trained one, or one that is
    served elsewhere."""

    model: str | None = None
    """Its folder or hub id; null: that of the run, as it is at the start."""
    trains: bool = False
    """Train it too, in recipes for several policies such as `apps.selfplay.main`."""
    seat_of: str | None = None
    """It is this trained model under another name, so that each side of a game has an episode and a reward."""
    url: str | None = None
    """A provider's base URL without `/v1`, to which requests are passed on as they are."""
    key: str | None = None
    """The environment variable with the provider's key."""
    name: str | None = None
    """What the provider calls the model; null: the same."""
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
        """Whether this run samples from it and does not train it."""
        return not self.trains and self.seat_of is None and self.url is None

    @property
    def parts(self) -> list[str]:
        """What the run starts for it."""
        if self.trains:
            return ["generator", "trainer"]
        return ["generator"] if self.is_frozen else []

    def check(self, path: str) -> None:
        """ConfigError: settings that contradict each other or do nothing. `path` is of the section."""
        kinds = {"trains": self.trains, "seat_of": self.seat_of is not None, "url": self.url is not None}
        named_kinds = [name for name, is_set in kinds.items() if is_set]
        if len(named_kinds) > 1:
            raise ConfigError(
                f"{path}.{named_kinds[0]} and {path}.{named_kinds[1]} contradict each other: set one of them"
            )
        kind = named_kinds[0] if named_kinds else "frozen"
        for name in sorted(self.model_fields_set - USES[kind]):
            if self[name] != type(self).model_fields[name].default:
                raise ConfigError(f"{path}.{name} does nothing: {REASONS[kind]}")
        if self.url is not None:
            self._check_provider(path, self.url)

    def _check_provider(self, path: str, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"{path}.url must be like https://api.openai.com, got {url!r}")
        if url.rstrip("/").endswith("/v1"):
            raise ConfigError(f"{path}.url must end before /v1: agents' paths follow it")
        if self.key is not None and not os.environ.get(self.key):
            raise ConfigError(f"{path}.key: the environment variable {self.key} is not set")


USES = {
    "frozen": {"model", "temperature", "template", "syntax", "generator"},
    "trains": {"model", "trains", "generator", "trainer", "critic", "ref_model"},
    "seat_of": {"seat_of"},
    "url": {"url", "key", "name"},
}
REASONS = {
    "frozen": "the model is frozen, and sampled here",
    "trains": "it samples as the run's policy does",
    "seat_of": "it is another seat of a trained model",
    "url": "somebody else serves the model",
}


def placed(options: Options, model: str, part: str) -> dict[str, Any]:
    """The options of a further model's part, whose name and metrics begin with the model's."""
    return {**options, "mesh_name": options.mesh_name or f"{model}_{part}", "env": {METRICS_OF: model, **options.env}}


def check_models(models: dict[str, FurtherModel], *, trains_several: bool) -> None:
    """ConfigError: names or settings of the section `models` that do not work.

    Args:
        trains_several: whether the recipe trains more than one policy.
    """
    for name, further in models.items():
        path = f"models.{name}"
        if name == POLICY or not name.replace("-", "_").isidentifier():
            reason = "is the run's model" if name == POLICY else "must be of letters, digits, - and _"
            raise ConfigError(f"{path}: {name!r} {reason}")
        further.check(path)
        if further.seat_of is not None and further.seat_of not in trained_models(models):
            names = ", ".join(trained_models(models))
            raise ConfigError(f"{path}.seat_of: {further.seat_of!r} is not trained here: name one of {names}")
        if further.trains and not trains_several:
            raise ConfigError(f"{path}.trains: this recipe trains one policy; use apps.selfplay.main or a loop like it")
        if further.seat_of is not None and not trains_several:
            raise ConfigError(f"{path}.seat_of: this recipe has one seat; use apps.selfplay.main or a loop like it")


def trained_models(models: dict[str, FurtherModel]) -> list[str]:
    """The names of the trained models, the run's own first."""
    return [POLICY, *(name for name, further in models.items() if further.trains)]


def seats(models: dict[str, FurtherModel]) -> dict[str, str]:
    """By each name whose turns become episodes, the trained model that plays there."""
    trained = {name: name for name in trained_models(models)}
    return trained | {name: further.seat_of for name, further in models.items() if further.seat_of is not None}
