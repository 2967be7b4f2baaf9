"""Verifiers as data: sections of a configuration, and what an ensemble keeps to find its verifiers again."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..config import ConfigError, Section
from ..data.rewards.load import load_reward
from ..plugin import load_plugin
from .cache import Cache
from .math import MathVerifier
from .panel import Panel
from .rules import AnswerFrequency, Rule
from .texts import BLANK_LINE, check_joining, check_prompt, check_steps
from .verifier import Verifier


@dataclass
class StoredSpec(Section):
    """A model in the folder or of the hub id `path`, and how it is held, see `forge.verifiers.RewardModel`."""

    path: str
    name: str | None = None
    device: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    batch_tokens: int = 8192

    def validate(self, where: str) -> None:
        if self.batch_tokens < 1:
            raise ConfigError(f"{where}.batch_tokens must be at least 1")


@dataclass
class ModelSpec(StoredSpec):
    """What all models say of how they read texts, see `forge.verifiers.RewardModel`."""

    prompt_template: str = "{question}"
    chat_template: bool | str = False
    system_prompt: str | None = None
    chat_options: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None

    def validate(self, where: str) -> None:
        """ConfigError: a folder that is not there, or without a configuration; settings that do not go together."""
        super().validate(where)
        folder = Path(self.path)
        is_local = self.path.startswith((".", "/", "~")) or folder.exists() or len(folder.parts) > 2
        is_local = is_local or ("/" in self.path and folder.parent.is_dir())  # a mistyped name in a folder
        if is_local and not (folder / "config.json").is_file():
            raise ConfigError(f"{where}.path: {self.path} is no folder with a model (config.json) in it")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"{where}.max_tokens must be at least 1")
        try:
            self.check()
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None

    def check(self) -> None:
        """What the verifier refuses of its settings before it reads the model. ValueError: says what."""
        check_prompt(self.prompt_template, self.chat_template, self.system_prompt, self.chat_options)


@dataclass
class RewardModelSpec(ModelSpec):
    """A sequence classifier, see `forge.verifiers.RewardModel`."""

    as_pair: bool = False
    append_eos: bool | None = None
    label: str | int | None = None
    scale: Literal["logit", "probability"] = "logit"
    slope: float = 1.0
    intercept: float = 0.0
    truncate: bool = False

    def check(self) -> None:
        super().check()
        check_joining(self.as_pair, self.append_eos, self.truncate, self.chat_template, self.scale)

    def verifier(self) -> Verifier:
        from .reward_model import RewardModel

        return RewardModel(**self)


@dataclass
class ProcessRewardModelSpec(ModelSpec):
    """A model that reads steps, see `forge.verifiers.ProcessRewardModel`. `marker` must be set."""

    marker: str = ""
    separator: str = BLANK_LINE
    joint: str = ""
    good: str | None = None
    bad: str | None = None
    label: str | int = 1

    def check(self) -> None:
        super().check()
        check_steps(self.marker, self.separator, self.good, self.bad)

    def verifier(self) -> Verifier:
        from .process import ProcessRewardModel

        return ProcessRewardModel(**self)


@dataclass
class JudgeSpec(Section):
    """A language model, see `forge.verifiers.LMJudge`. `template` null is its own; `api_key_env` names the environment
    variable that holds the key; `prices` are for a million tokens of questions and of answers."""

    url: str
    model: str
    name: str | None = None
    template: str | None = None
    system_prompt: str | None = None
    endpoint: Literal["chat", "completions"] = "chat"
    scoring: Literal["votes", "logprob"] = "votes"
    votes: int = 1
    temperature: float = 1.0
    yes: str = "yes"
    no: str = "no"
    max_tokens: int = 16
    top: int = 5
    concurrency: int = 8
    retries: int = 4
    request_timeout: float = 30.0
    time_limit: float = 50.0
    api_key_env: str | None = None
    prices: list[float] = field(default_factory=lambda: [0.0, 0.0])
    budget: float | None = None

    def validate(self, where: str) -> None:
        """ConfigError: what `LMJudge` refuses, aiohttp or the key is not there."""
        if len(self.prices) != 2:
            raise ConfigError(f"{where}.prices must be two numbers: for a million tokens of questions, and of answers")
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise ConfigError(f"{where}.api_key_env: the environment has no {self.api_key_env}")
        try:
            self.verifier()  # opens nothing
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{where}: {error}") from None

    def verifier(self) -> Verifier:
        from .judge import TEMPLATE, LMJudge

        settings = {
            name: value for name, value in {**self}.items() if name not in ("template", "api_key_env", "prices")
        }
        key = os.environ.get(self.api_key_env) if self.api_key_env else None
        prices = (self.prices[0], self.prices[1])
        return LMJudge(template=self.template or TEMPLATE, api_key=key, prices=prices, **settings)


@dataclass
class VerifiersConfig(Section):
    """A panel of verifiers.

    rules: functions, as `package.module:Name` or a name of `forge.data.rewards`.
    math: compare final answers with the target, see `forge.verifiers.MathVerifier`.
    answer_frequency: the function that tells a response's answer, such as `final_answer`; null: not asked.
    plugins: further verifiers as `{use: package.module:Name, ...}` with their settings, such as
        `forge_sandbox:CodeVerifier` and `forge_weaver:Distilled`, see `forge.verifiers.Verifier`.
    timeout: seconds in which each verifier must get on with some call, see `forge.verifiers.Panel`; rule_timeout: that
        a rule has for one response.
    cache: a file for scores, which may be shared; null: none.
    """

    rules: list[str] = field(default_factory=list)
    reward_models: list[RewardModelSpec] = field(default_factory=list)
    process_reward_models: list[ProcessRewardModelSpec] = field(default_factory=list)
    judges: list[JudgeSpec] = field(default_factory=list)
    math: bool = False
    answer_frequency: str | None = None
    plugins: list[dict[str, Any]] = field(default_factory=list)
    timeout: float = 60.0
    rule_timeout: float = 10.0
    cache: str | None = None

    def validate(self, where: str = "verifiers") -> None:
        """Check what can be known without opening a model or a connection.

        Raises:
            ConfigError: says which key and what to do.
        """
        if min(self.timeout, self.rule_timeout) <= 0:
            raise ConfigError(f"{where}.timeout and rule_timeout must be above 0 seconds")
        for kind in ("reward_models", "process_reward_models", "judges"):
            for number, spec in enumerate(self[kind]):
                spec.validate(f"{where}.{kind}[{number}]")
        try:
            for plugin in self._plugins(where):
                if hasattr(plugin, "check"):
                    plugin.check()
            names = self.names
        except (ValueError, OSError) as error:
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
        others = [spec.verifier() for spec in self.reward_models]
        others += [spec.verifier() for spec in self.process_reward_models]
        others += [spec.verifier() for spec in self.judges]
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
