"""Configuration of the making of an ensemble."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from forge.config import Section
from forge.data.config import DatasetConfig
from forge.engines import EngineSettings
from forge.recipes.schema import RunConfig
from forge.runtime.controller import Options
from forge.system import extras
from forge_verifiers.config import VerifiersConfig
from forge_weaver import make


class CollectConfig(Section):
    """The responses that an ensemble is made from."""

    problems: PositiveInt = 500
    """Prompts."""
    n_samples: PositiveInt = 8
    """Responses to each."""
    temperature: PositiveFloat = 1.0
    """Of sampling."""
    max_tokens: PositiveInt = 512
    """Most tokens of a response."""
    truth: str | None = None
    """The reward function that decides which are right: for the report, and for the fit as far as `fit.labelled` lets
    it see."""


class FitConfig(Section):
    """How scores become one probability."""

    method: str = "auto"
    """Of [weaver.md](weaver.md)."""
    labelled: NonNegativeInt = 0
    """So many problems show their labels."""
    class_balance: float | None = None
    """The share of right responses where it is known."""
    one_right: bool = False
    """Exactly one response of each problem is right."""

    def _check(self) -> None:
        make(self.method, self.class_balance, self.one_right, self.labelled)
        if self.method == "anchored" and not self.labelled:
            raise ValueError("fit.method anchored needs fit.labelled: problems whose labels it may see")


class DistilConfig(Section):
    """A sequence classifier that learns the ensemble's probability, see `forge_weaver.distil`."""

    model: str
    """Any that transformers can make a sequence classifier of."""
    epochs: PositiveInt = 4
    """Passes over the responses."""
    batch_size: PositiveInt = 64
    """Responses of a step."""
    learning_rate: PositiveFloat = 5e-5
    """Peak learning rate."""
    max_tokens: PositiveInt | None = None
    """Longest row."""
    as_pair: bool = True
    """Give prompt and response as two texts."""


class Services(Section):
    """Placement of each component."""

    generator: Options = Options()
    verifiers: Options = Options()


class WeaverConfig(Section):
    """The making of an ensemble in `<run.root>/<run.name>/`."""

    model: str
    """A folder in Hugging Face format, or a hub id."""
    dataset: DatasetConfig
    verifiers: VerifiersConfig
    collect: CollectConfig = CollectConfig()
    fit: FitConfig = FitConfig()
    distil: DistilConfig | None = None
    generator: EngineSettings = EngineSettings()
    services: Services = Services()
    run: RunConfig = Field(default_factory=lambda: RunConfig(name="weaver"))
    seed: int = 0
    """Random seed."""

    def _check(self) -> None:
        if extras.are_needed():
            self.generator.check_installed()
        self.generator.over(self.services.generator.procs)
        if self.fit.labelled > self.collect.problems:
            raise ValueError("fit.labelled must be at most collect.problems")
        if self.fit.labelled and self.collect.truth is None:
            raise ValueError("fit.labelled needs collect.truth: nothing else decides which responses are right")
        for name in type(self.services).model_fields:
            if self.services[name].procs != 1 and name != "generator":
                raise ValueError(f"services.{name}.procs must be 1: scale it with num_replicas")
