"""What the making of an ensemble can be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from forge.config import ConfigError, Section
from forge.data.config import DatasetConfig
from forge.sections import GeneratorConfig, RunConfig, ServiceConfig
from forge.verifiers.spec import VerifiersConfig
from forge_weaver import make


@dataclass
class CollectConfig(Section):
    """`n_samples` responses to each of `problems` prompts. `truth` names the reward function that says which are right:
    for the report, and for the fit as far as `fit.labelled` lets it see."""

    problems: int = 500
    n_samples: int = 8
    temperature: float = 1.0
    max_tokens: int = 512
    truth: str | None = None

    def validate(self) -> None:
        if self.problems < 1 or self.n_samples < 1 or self.max_tokens < 1 or self.temperature <= 0:
            raise ConfigError(
                "collect.problems, n_samples and max_tokens must be at least 1, and collect.temperature positive"
            )


@dataclass
class FitConfig(Section):
    """`method` as of `forge_weaver.make`; `labelled` problems show their labels to it; `class_balance` is the
    share of right responses where it is known, and with `one_right` each problem has exactly one."""

    method: str = "auto"
    labelled: int = 0
    class_balance: float | None = None
    one_right: bool = False

    def validate(self) -> None:
        try:
            make(self.method, self.class_balance, self.one_right, self.labelled)
        except ValueError as error:
            raise ConfigError(f"fit: {error}") from None
        if self.method == "majority":
            raise ConfigError(
                "fit.method majority needs answers, which are not told apart here: set verifiers.answer_frequency"
            )
        if self.method == "anchored" and not self.labelled:
            raise ConfigError("fit.method anchored needs fit.labelled: problems whose labels it may see")


@dataclass
class DistilConfig(Section):
    """A sequence classifier made from `model`, any that transformers can give such a head, see
    `forge_weaver.distil`."""

    model: str
    epochs: int = 4
    batch_size: int = 64
    learning_rate: float = 5e-5
    max_tokens: int | None = None
    as_pair: bool = True

    def validate(self) -> None:
        least = min(self.epochs, self.batch_size, 1 if self.max_tokens is None else self.max_tokens)
        if least < 1 or self.learning_rate <= 0:
            raise ConfigError("distil.epochs, batch_size and max_tokens must be at least 1, learning_rate positive")


@dataclass
class Services(Section):
    generator: ServiceConfig = field(default_factory=ServiceConfig)
    verifiers: ServiceConfig = field(default_factory=ServiceConfig)


@dataclass
class WeaverConfig(Section):
    """An ensemble in `<run.root>/<run.name>/`."""

    model: str
    dataset: DatasetConfig
    verifiers: VerifiersConfig
    collect: CollectConfig = field(default_factory=CollectConfig)
    fit: FitConfig = field(default_factory=FitConfig)
    distil: DistilConfig | None = None
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    services: Services = field(default_factory=Services)
    run: RunConfig = field(default_factory=lambda: RunConfig(name="weaver"))
    seed: int = 0

    def validate(self) -> None:
        for section in (self.dataset, self.collect, self.fit, self.generator):
            section.validate()
        if self.distil is not None:
            self.distil.validate()
        if not 0 <= self.fit.labelled <= self.collect.problems:
            raise ConfigError("fit.labelled must be at least 0 and at most collect.problems")
        if self.fit.labelled and self.collect.truth is None:
            raise ConfigError("fit.labelled needs collect.truth: nothing else says which responses are right")
        for name in self.services:
            self.services[name].validate(name)
