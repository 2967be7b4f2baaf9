"""Verifiers as data: sections of a configuration, and what an ensemble keeps to find its verifiers again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat

from ..config import ConfigError, Section
from ..data.rewards.load import load_reward
from ..plugin import load_plugin
from .cache import Cache
from .math import MathVerifier
from .panel import Panel
from .rules import AnswerFrequency, Rule
from .settings import JudgeSettings, ProcessRewardModelSettings, RewardModelSettings
from .verifier import Verifier


class VerifiersConfig(Section):
    """A panel of verifiers ([verifiers.md](verifiers.md)): of `reward.verifiers`, and of the file that `forge weaver
    score --verifiers` reads."""

    rules: list[str] = Field(default_factory=list)
    """Functions, as `package.module:Name` or a name of `forge.data.rewards`."""
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

    def check_sources(self, where: str = "verifiers") -> None:
        """Check everything that can be known without opening a model or a connection.

        Raises:
            ConfigError: says which key and what to do.
        """
        for kind in ("reward_models", "process_reward_models"):
            for number, spec in enumerate(self[kind]):
                try:
                    spec.check_sources(f"{where}.{kind}[{number}]")
                except ValueError as error:
                    raise ConfigError(str(error)) from None
        try:
            for plugin in self._plugins(where):
                if hasattr(plugin, "check"):
                    plugin.check()
            names = self.names
            if self.judges:
                from .judge import LMJudge as _  # noqa: F401
        except (ValueError, OSError, ImportError) as error:
            raise ConfigError(f"{where}: {error}") from None
        if not names:
            raise ConfigError(f"{where} has none: set rules, reward_models, judges, math or another")
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            rename = "give one another name (a rule has that of its function)"
            raise ConfigError(f"{where}: two are called {', '.join(repeated)}: {rename}")
        if self.cache is not None and not Path(self.cache).parent.is_dir():
            raise ConfigError(f"{where}.cache: the folder of {self.cache} does not exist")

    @property
    def names(self) -> list[str]:
        """The columns of the panel, in its order. ValueError: a function that is not there."""
        names = [name for verifier in self._functions() for name in verifier.names]
        names += [spec.name or Path(spec.path).name for spec in self.reward_models]
        for spec in self.process_reward_models:
            names += [f"{spec.name or Path(spec.path).name}_{reading}" for reading in ("min", "mean", "last")]
        names += [spec.name or spec.model for spec in self.judges]
        return names + [name for plugin in self._plugins("verifiers") for name in plugin.names]

    def panel(self) -> Panel:
        """Load all of them. ValueError, OSError: one cannot be had; says why."""
        others: list[Verifier] = []
        if self.reward_models:
            from .reward_model import RewardModel

            others += [RewardModel(**spec) for spec in self.reward_models]
        if self.process_reward_models:
            from .process import ProcessRewardModel

            others += [ProcessRewardModel(**spec) for spec in self.process_reward_models]
        if self.judges:
            from .judge import LMJudge

            others += [LMJudge(**spec) for spec in self.judges]
        for plugin in self._plugins("verifiers"):
            if hasattr(plugin, "setup"):
                plugin.setup()
            others.append(plugin)
        cache = Cache(self.cache) if self.cache is not None else None
        return Panel([*self._functions(), *others], timeout=self.timeout, cache=cache)

    def _functions(self) -> list[Verifier]:
        found: list[Verifier] = [Rule(load_reward(name), time_limit=self.rule_timeout) for name in self.rules]
        if self.math:
            found.append(MathVerifier(time_limit=self.rule_timeout))
        if self.answer_frequency is not None:
            found.append(AnswerFrequency(load_reward(self.answer_frequency, "answer function")))
        return found

    def _plugins(self, where: str) -> list[Any]:
        return [load_plugin(item, f"{where}.plugins[{number}]") for number, item in enumerate(self.plugins)]
