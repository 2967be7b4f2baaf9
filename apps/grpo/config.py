"""What a GRPO run can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from forge.algorithms import Algorithm, Correction, load_algorithm
from forge.config import ConfigError, Section
from forge.data.config import DatasetConfig
from forge.sections import MetricsConfig, RecipeConfig, ServiceConfig


@dataclass
class AlgorithmConfig(Section):
    """`n_samples` completions a prompt, and the settings of the algorithm; null is the algorithm's own.

    `beta` > 0 adds a KL penalty to a frozen reference model, `reference` or else the start; `normalize` divides
    advantages by the group's standard deviation; `horizon` (null: `max_tokens`) is that of aggregation fixed_horizon.
    `correction` weighs tokens by how much the trained policy differs from what sampled them, see
    `forge.losses.Correction`. `overlong_buffer` tokens before `max_tokens` the reward begins to fall. `loss` is what
    else the algorithm's constructor takes.
    """

    n_samples: int = 8
    temperature: float = 1.0
    max_tokens: int = 512
    clip_low: float | None = None
    clip_high: float | None = None
    beta: float | None = None
    normalize: bool | None = None
    horizon: int | None = None
    overlong_buffer: int = 0
    reference: str | None = None
    correction: Literal["none", "truncate", "mask"] | None = None
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    correction_low: float = 0.5
    correction_high: float = 2.0
    loss: dict[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """Of the algorithm's constructor, as far as they are set."""
        named = {name: self[name] for name in ("clip_low", "clip_high", "beta", "normalize")}
        settings = {name: value for name, value in named.items() if value is not None}
        if self.correction is not None:
            bounds = self.correction_level, self.correction_low, self.correction_high
            settings["correction"] = None if self.correction == "none" else Correction(self.correction, *bounds)
        if twice := settings.keys() & self.loss.keys():
            raise ConfigError(f"grpo.{min(twice)} and grpo.loss.{min(twice)} are the same setting: keep one")
        return settings | self.loss


@dataclass
class CriticConfig(Section):
    """A critic of its own weights, from `model` (null: the policy's start) with a new head; `clip` bounds how far a
    value may move in one step."""

    model: str | None = None
    learning_rate: float = 1e-5
    clip: float | None = 0.2

    def validate(self) -> None:
        if self.learning_rate < 0 or (self.clip is not None and self.clip <= 0):
            raise ConfigError("critic.learning_rate must be at least 0, and critic.clip null or above 0")


@dataclass
class AsyncConfig(Section):
    """`max_policy_age`: versions that a trained token may be old; 0 is lock-step."""

    max_policy_age: int = 1
    order: Literal["fifo", "random"] = "fifo"


@dataclass
class Services(Section):
    generator: ServiceConfig = field(default_factory=ServiceConfig)
    trainer: ServiceConfig = field(default_factory=ServiceConfig)
    critic: ServiceConfig = field(default_factory=ServiceConfig)
    ref_model: ServiceConfig = field(default_factory=ServiceConfig)
    reward: ServiceConfig = field(default_factory=lambda: ServiceConfig(share="helpers"))
    dataset: ServiceConfig = field(default_factory=lambda: ServiceConfig(share="helpers"))
    replay_buffer: ServiceConfig = field(default_factory=lambda: ServiceConfig(share="helpers"))


@dataclass
class RolloutMetrics(MetricsConfig):
    """`rollouts`: how many sampled rollouts of each step are kept."""

    rollouts: int = 1


@dataclass
class GRPOConfig(RecipeConfig):
    dataset: DatasetConfig
    algorithm: str = "grpo"
    grpo: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    async_: AsyncConfig = field(default_factory=AsyncConfig)
    services: Services = field(default_factory=Services)
    metrics: RolloutMetrics = field(default_factory=RolloutMetrics)

    def others(self) -> dict[str, str]:
        named = {"grpo.reference": self.grpo.reference, "critic.model": self.critic.model}
        return {key: name for key, name in named.items() if name is not None}

    def load_algorithm(self) -> Algorithm:
        """The algorithm that is named, with its settings.

        Raises:
            ConfigError: there is no such algorithm, or a setting does nothing or is out of range.
        """
        settings = self.grpo.settings()
        if self.training.entropy_coef:
            if "entropy_coef" in settings:
                raise ConfigError("training.entropy_coef and grpo.loss.entropy_coef are the same setting: keep one")
            settings["entropy_coef"] = self.training.entropy_coef
        try:
            return load_algorithm(self.algorithm, **settings)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def shares(self, algorithm: Algorithm) -> dict[str, Any]:
        """How tokens share the loss, for `forge.data.packing.pack`."""
        aggregation = self.training.aggregation or algorithm.aggregation
        horizon = (self.grpo.horizon or self.grpo.max_tokens) if aggregation == "fixed_horizon" else None
        return {"aggregation": aggregation, "horizon": horizon}

    def validate(self) -> None:
        super().validate()
        self.critic.validate()
        algorithm, algo, unset = self.load_algorithm(), self.grpo, AlgorithmConfig()
        aggregation, updates = self.shares(algorithm)["aggregation"], self.training.mini_batches * self.training.epochs
        corrected = algo.correction or "none"
        for bad, message in (
            (algo.n_samples < 1, "grpo.n_samples must be at least 1"),
            (
                algo.n_samples < 2 and algorithm.within_group,
                f"grpo.n_samples must be at least 2: {self.algorithm} compares the samples of a prompt with one "
                "another, and one sample has nothing to be compared with",
            ),
            (algo.max_tokens < 1, "grpo.max_tokens must be at least 1"),
            (self.async_.max_policy_age < 0, "async.max_policy_age must be at least 0"),
            (
                self.colocated and self.async_.max_policy_age != 0,
                "colocated: trainer and generator take turns, so async.max_policy_age must be 0",
            ),
            (self.metrics.rollouts < 0, "metrics.rollouts must be at least 0"),
            (not algo.temperature > 0, "grpo.temperature must be positive: greedy samples of a prompt are all equal"),
            (algo.max_tokens >= self.training.seq_len, "training.seq_len must exceed grpo.max_tokens"),
            (
                self.async_.max_policy_age < self.training.sync_interval - 1,
                f"training.sync_interval = {self.training.sync_interval} makes weights older than async.max_policy_age "
                f"= {self.async_.max_policy_age} allows: raise it to at least {self.training.sync_interval - 1}",
            ),
            (
                algo.horizon is not None and (algo.horizon < 1 or aggregation != "fixed_horizon"),
                f"grpo.horizon must be at least 1, and does something under aggregation fixed_horizon only: this is "
                f"{aggregation}",
            ),
            (
                algorithm.fixed_aggregation and aggregation != algorithm.aggregation,
                f"{self.algorithm} means something under training.aggregation {algorithm.aggregation} only",
            ),
            (
                algorithm.on_policy and updates > 1,
                f"{self.algorithm} takes every sample as the policy's own, which holds for the first update of a step "
                "only: set grpo.loss.clip_ratio or grpo.correction, or make one update",
            ),
            (
                not algorithm.beta and bool({"kl", "kl_in"} & algo.loss.keys()),
                "grpo.loss.kl and grpo.loss.kl_in do nothing: grpo.beta is 0",
            ),
            (
                not algorithm.uses_rewards and algo.overlong_buffer > 0,
                f"grpo.overlong_buffer does nothing: {self.algorithm} does not look at rewards",
            ),
            (
                not 0 <= algo.overlong_buffer < algo.max_tokens,
                "grpo.overlong_buffer must be at least 0 and below grpo.max_tokens",
            ),
            (
                not algorithm.needs_reference and self.services.ref_model != ServiceConfig(),
                "services.ref_model is set and nothing uses it: grpo.beta is 0",
            ),
            (
                not algorithm.needs_reference and algo.reference is not None,
                "grpo.reference is set and nothing uses it: grpo.beta is 0",
            ),
            (
                algorithm.needs_teacher and algo.reference is None,
                f"algorithm {self.algorithm} needs grpo.reference: the teacher's folder or hub id",
            ),
            (
                not algorithm.needs_critic
                and (self.critic != CriticConfig() or self.services.critic != ServiceConfig()),
                f"critic or services.critic is set and nothing uses it: {self.algorithm} has no critic",
            ),
            (
                corrected != "mask" and algo.correction_low != unset.correction_low,
                "grpo.correction_low does something only if grpo.correction is mask",
            ),
            (
                corrected == "none"
                and (algo.correction_high, algo.correction_level) != (unset.correction_high, unset.correction_level),
                "grpo.correction_high and grpo.correction_level do nothing: grpo.correction is not set",
            ),
        ):
            if bad:
                raise ConfigError(message)
        needed = {"critic": algorithm.needs_critic, "ref_model": algorithm.needs_reference}
        self.validate_services(self.services, idle=tuple(name for name in needed if not needed[name]))
        room = self.training.seq_len - algo.max_tokens
        together = f"dataset.max_prompt_tokens and grpo.max_tokens together exceed training.seq_len: at most {room}"
        self.dataset.bound("max_prompt_tokens", room, together)
        if self.eval.every % self.training.sync_interval:
            raise ConfigError(
                "eval.every must be a multiple of training.sync_interval: only then are the weights in use"
            )
