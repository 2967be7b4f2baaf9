"""What a GRPO run can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from forge.config import ConfigError, Section
from forge.sections import RecipeConfig, ServiceConfig


@dataclass
class AlgorithmConfig(Section):
    """GRPO: `n_samples` completions a prompt, scored against one another.

    `beta` > 0 adds a KL penalty to a frozen reference model; `normalize` divides advantages by the group's standard
    deviation; `skip_no_signal` leaves out groups whose rewards are all equal. `correction` weighs tokens by how much
    the trained policy differs from what sampled them, truncated at `correction_high` or masked outside the two bounds,
    in place of the clip, see `forge.losses.GRPOLoss`.
    """

    n_samples: int = 8
    clip_low: float = 0.2
    clip_high: float = 0.28
    beta: float = 0.0
    temperature: float = 1.0
    max_tokens: int = 512
    normalize: bool = True
    skip_no_signal: bool = True
    correction: Literal["none", "truncate", "mask"] = "none"
    correction_low: float = 0.5
    correction_high: float = 2.0

    def loss(self) -> dict[str, Any]:
        """Settings for `forge.losses.GRPOLoss`."""
        names = ("clip_low", "clip_high", "beta", "correction", "correction_low", "correction_high")
        return {name: self[name] for name in names}


@dataclass
class AsyncConfig(Section):
    """`max_policy_age`: versions that a trained token may be old; 0 is lock-step."""

    max_policy_age: int = 1
    order: Literal["fifo", "random"] = "fifo"


@dataclass
class Services(Section):
    generator: ServiceConfig = field(default_factory=ServiceConfig)
    trainer: ServiceConfig = field(default_factory=ServiceConfig)
    ref_model: ServiceConfig = field(default_factory=ServiceConfig)
    reward: ServiceConfig = field(default_factory=lambda: ServiceConfig(share="helpers"))
    dataset: ServiceConfig = field(default_factory=lambda: ServiceConfig(share="helpers"))
    replay_buffer: ServiceConfig = field(default_factory=lambda: ServiceConfig(share="helpers"))


@dataclass
class GRPOConfig(RecipeConfig):
    grpo: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    async_: AsyncConfig = field(default_factory=AsyncConfig)
    services: Services = field(default_factory=Services)

    def validate(self) -> None:
        super().validate()
        self.parallelism.validate(self.services.trainer.procs)
        for bad, message in (
            (self.grpo.n_samples < 2, "grpo.n_samples must be at least 2: one sample has nothing to be compared with"),
            (self.grpo.temperature <= 0, "grpo.temperature must be positive: greedy samples of a prompt are all equal"),
            (self.grpo.max_tokens >= self.training.seq_len, "training.seq_len must exceed grpo.max_tokens"),
            (
                self.async_.max_policy_age < self.training.sync_interval - 1,
                f"training.sync_interval = {self.training.sync_interval} makes weights older than async.max_policy_age "
                f"= {self.async_.max_policy_age} allows: raise it to at least {self.training.sync_interval - 1}",
            ),
            (
                self.services.ref_model != ServiceConfig() and not self.grpo.beta,
                "services.ref_model is set and nothing uses it: grpo.beta is 0",
            ),
            (
                self.grpo.correction != "mask" and self.grpo.correction_low != AlgorithmConfig.correction_low,
                "grpo.correction_low does something only if grpo.correction is mask",
            ),
            (
                self.grpo.correction == "none" and self.grpo.correction_high != AlgorithmConfig.correction_high,
                "grpo.correction_high does nothing: grpo.correction is none",
            ),
        ):
            if bad:
                raise ConfigError(message)
        for name in self.services:
            self.services[name].validate(
                name, ranks=name == "trainer", replicas=name not in ("trainer", "replay_buffer", "dataset")
            )
        room = self.training.seq_len - self.grpo.max_tokens
        if self.dataset.max_prompt_tokens is None:
            self.dataset.max_prompt_tokens = room
        elif self.dataset.max_prompt_tokens > room:
            raise ConfigError(
                f"dataset.max_prompt_tokens and grpo.max_tokens together exceed training.seq_len: at most {room}"
            )
        if self.eval.every % self.training.sync_interval:
            raise ConfigError(
                "eval.every must be a multiple of training.sync_interval: only then are the weights in use"
            )
