"""The section `verifiers`: which models, judges and rules make a panel."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat

from forge.config.plugin import Object, load_plugin
from forge.config.sections import ConfigError, Section, build
from forge.rewards.rules import load_reward
from forge.rewards.verifier import Verifier

from .cache import Cache
from .panel import Panel
from .process import ProcessRewardModel
from .reward_model import RewardModel
from .rule_verifiers import AnswerFrequency, MathVerifier, Rule
from .settings import JudgeSettings, ModelSettings, ProcessRewardModelSettings, RewardModelSettings


class VerifiersConfig(Section):
    """A panel of verifiers ([verifiers.md](verifiers.md)): of `reward.verifiers`, and of the file that `forge weaver
    score --verifiers` reads."""

    rules: list[str] = Field(default_factory=list)
    """Functions, as `package.module:Name` or a name of `forge.rewards.rules`."""
    reward_models: list[RewardModelSettings] = Field(default_factory=list)
    """Sequence classifiers."""
    process_reward_models: list[ProcessRewardModelSettings] = Field(default_factory=list)
    """Models that read steps."""
    judges: list[JudgeSettings] = Field(default_factory=list)
    """Language models."""
    math: bool = False
    """Compare final answers with the target."""
    answer_frequency: str | None = None
    """The function that reads a response's answer, such as `final_answer`: its frequency is a score; null: none."""
    plugins: list[dict[str, Any]] = Field(default_factory=list)
    """Further verifiers with their settings, `{use: package.module:Name, ...}`, such as `forge_sandbox:CodeVerifier`
    and `forge_weaver:Distilled`."""
    timeout: PositiveFloat = 60.0
    """Seconds in which each verifier must make progress with some call."""
    rule_timeout: PositiveFloat = 10.0
    """Seconds that a rule has for one response."""
    cache: str | None = None
    """A file for scores, which runs may share; null: none."""

    def check_sources(self, location: str = "verifiers") -> None:
        """Check everything that needs no model and no connection.

        Raises:
            ConfigError: names the key and the remedy.
        """
        try:
            for kind in ("reward_models", "process_reward_models"):
                for number, spec in enumerate(self[kind]):
                    spec.check_sources(f"{location}.{kind}[{number}]")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        try:
            for plugin in self._plugins(location):
                if hasattr(plugin, "check"):
                    plugin.check()
            names = self.names
            if self.judges:
                from .judge import LMJudge as _  # noqa: F401
        except (ValueError, OSError, ImportError) as error:
            raise ConfigError(f"{location}: {error}") from None
        # Columns are named: two of one name could not be distinguished in a report.
        if not names:
            raise ConfigError(f"{location} has none: set rules, reward_models, judges, math or another")
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            rename = "give one another name (a rule has that of its function)"
            raise ConfigError(f"{location}: two are called {', '.join(repeated)}: {rename}")
        if self.cache is not None and not Path(self.cache).parent.is_dir():
            raise ConfigError(f"{location}.cache: the folder of {self.cache} does not exist")

    @property
    def names(self) -> list[str]:
        """The columns of the panel, in order. ValueError: a function does not exist."""
        # In the order in which `panel` constructs them, without loading a model.
        names = [name for verifier in self._functions() for name in verifier.names]
        names += [spec.name or Path(spec.path).name for spec in self.reward_models]
        for spec in self.process_reward_models:
            names += [f"{spec.name or Path(spec.path).name}_{reading}" for reading in ("min", "mean", "last")]
        names += [spec.name or spec.model for spec in self.judges]
        return names + [name for plugin in self._plugins("verifiers") for name in plugin.names]

    def planned_models(self) -> list[ModelSettings]:
        """The models that the panel loads, of plugins too. ValueError, OSError: those of a plugin cannot be read."""
        plugins = models_of(self._plugins("verifiers"))
        return [*self.reward_models, *self.process_reward_models, *plugins]

    def panel(self) -> Panel:
        """Load all verifiers. ValueError, OSError: a model or plugin cannot be loaded."""
        verifiers: list[Verifier] = [RewardModel(**spec) for spec in self.reward_models]
        verifiers += [ProcessRewardModel(**spec) for spec in self.process_reward_models]
        if self.judges:  # which need an extra
            from .judge import LMJudge

            verifiers += [LMJudge(**spec) for spec in self.judges]
        for plugin in self._plugins("verifiers"):
            if hasattr(plugin, "setup"):
                plugin.setup()
            verifiers.append(plugin)
        cache = Cache(self.cache) if self.cache is not None else None
        return Panel([*self._functions(), *verifiers], timeout=self.timeout, cache=cache)

    def _functions(self) -> list[Verifier]:
        verifiers: list[Verifier] = [Rule(load_reward(name), time_limit=self.rule_timeout) for name in self.rules]
        if self.math:
            verifiers.append(MathVerifier(time_limit=self.rule_timeout))
        if self.answer_frequency is not None:
            verifiers.append(AnswerFrequency(load_reward(self.answer_frequency, "answer function")))
        return verifiers

    def _plugins(self, location: str) -> list[Any]:
        return [load_plugin(item, f"{location}.plugins[{number}]") for number, item in enumerate(self.plugins)]


def read_section(values: Any) -> VerifiersConfig:
    """Return the section of a mapping, or of what it was read to before. ConfigError: names the key."""
    return values if isinstance(values, VerifiersConfig) else build(VerifiersConfig, values, "reward.verifiers")


def models_of(scorers: Iterable[Object]) -> list[ModelSettings]:
    """The models that verifiers load: those which their method `planned_models`, where they have one, names.

    Raises:
        ValueError, OSError: the settings of one cannot be read.
    """
    loading = [scorer for scorer in scorers if hasattr(scorer, "planned_models")]
    return [settings for scorer in loading for settings in scorer.planned_models()]
