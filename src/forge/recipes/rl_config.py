"""Configuration of the reinforcement-learning recipe, with a reward or with environments."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from ..algorithms import Algorithm, Correction, load_algorithm
from ..algorithms.base import OwnLoss
from ..config.plugin import resolve
from ..config.sections import ConfigError, Section
from ..data.config import DatasetConfig, RowsConfig
from ..engines.interface import check_length
from ..envs.config import EpisodeConfig
from ..observability.console import log
from ..runtime.controller import Options
from .lengths import longest_sequence, with_room
from .metrics_config import MetricsConfig
from .schema import RecipeConfig, RewardConfig


class AlgorithmConfig(Section):
    """Sampling, and the settings of the algorithm: every field of its class is a key here, such as `clip_high` or
    `beta` ([algorithms.md](algorithms.md)). A setting that the algorithm does not have is an error."""

    model_config = ConfigDict(extra="allow")

    n_samples: PositiveInt = 8
    """Completions of a prompt."""
    temperature: PositiveFloat = 1.0
    """Of sampling; the trainer scores the same distribution."""
    max_tokens: PositiveInt = 512
    """Most tokens of a completion; of one turn in an environment."""
    horizon: PositiveInt | None = None
    """Tokens, of aggregation `fixed_horizon`; null: `max_tokens`."""
    overlong_buffer: NonNegativeInt = 0
    """So many tokens before `max_tokens` the reward begins to fall, by 1 at the limit."""
    reference: str | None = None
    """The frozen model, or the teacher of `distill`; null: the start."""
    correction: Literal["none", "truncate", "mask"] | None = None
    """Weigh by the trained policy over the sampler, in place of the clip: at most `correction_high` (`truncate`), or 0
    outside `correction_low` to `correction_high` (`mask`) ([weights.md](weights.md))."""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """The ratio of each token, the product over a sequence, or its geometric mean."""
    correction_low: float = 0.5
    """Lower bound of `mask`."""
    correction_high: float = 2.0
    """Upper bound."""
    loss: dict[str, Any] = Field(default_factory=dict)
    """Settings of an algorithm of your own whose names are taken here."""

    def settings(self) -> dict[str, Any]:
        """Of the algorithm's constructor, as far as they are set."""
        extra = (self.model_extra or {}).items()
        # Null stands for the algorithm's own default, except where a setting can be switched off.
        settings = {name: value for name, value in extra if value is not None or name == "dual_clip"}
        if self.correction is not None:
            bounds = self.correction_level, self.correction_low, self.correction_high
            settings["correction"] = None if self.correction == "none" else Correction(self.correction, *bounds)
        if twice := settings.keys() & self.loss.keys():
            raise ConfigError(f"grpo.{min(twice)} and grpo.loss.{min(twice)} are the same setting: keep one")
        return settings | self.loss


class CriticConfig(Section):
    """The critic of `ppo`, with weights of its own."""

    model: str | None = None
    """Null: the policy's start, with a new head."""
    learning_rate: float = Field(1e-5, ge=0)
    """Peak learning rate."""
    clip: PositiveFloat | None = 0.2
    """How far a value may move in one step; null: any."""


class AsyncConfig(Section):
    """How far sampling runs ahead of training."""

    max_policy_age: int | None = Field(None, ge=0)
    """Versions that a trained token may be old, which the trainer verifies; 0 is lock-step. Null:
    `training.sync_interval`, or 0 if `colocated`."""
    order: Literal["fifo", "random"] = "fifo"
    """Of the replay buffer."""


class Services(Section):
    """Placement of each component."""

    generator: Options = Options()
    trainer: Options = Options()
    critic: Options = Options()
    ref_model: Options | None = None
    """The frozen model that `grpo.beta` keeps the policy close to. Null: none is started, and the KL is to the
    generator's weights, by the log-probabilities that it recorded."""
    reward: Options | None = Options()
    """Null: in the controller's process, for functions that are quick and sure to end."""
    dataset: Options | None = None
    """Null: in the controller's process."""
    replay_buffer: Options | None = None
    """Null: in the controller's process."""


class RolloutMetrics(MetricsConfig):
    """Besides `metrics.jsonl`, the console and the report ([trackers.md](trackers.md)), and recorded rollouts."""

    rollouts: NonNegativeInt | Literal["all"] = 1
    """Groups of each step that `rollouts.arrow` records with all of their tokens ([watching.md](watching.md)), and as
    many of those that were dropped. `all`: every one."""
    rollouts_mb: PositiveInt = 1000
    """Size at which that file is full."""


class RLConfig(RecipeConfig):
    """Reinforcement learning."""

    dataset: DatasetConfig
    algorithm: Any = "grpo"
    """A name of [algorithms.md](algorithms.md), or `package.module:Name`; from Python also the object itself."""
    grpo: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    async_: AsyncConfig = AsyncConfig()
    environment: Any = None
    """What the policy acts in, in place of `reward`: `package.module:Name`, called without arguments for each episode
    ([agents.md](agents.md)); from Python also the callable itself."""
    episode: EpisodeConfig = EpisodeConfig()
    services: Services = Services()
    metrics: RolloutMetrics = RolloutMetrics()

    @property
    def multi_turn(self) -> bool:
        """Whether the policy acts in an environment."""
        return self.environment is not None

    def make_environment(self) -> Any:
        """The callable that makes an environment. ConfigError: the name is unknown, or not callable."""
        found = resolve(self.environment, "environment") if isinstance(self.environment, str) else self.environment
        if not callable(found):
            raise ConfigError(f"environment {self.environment!r} is not callable: name what makes one")
        return found

    def others(self) -> dict[str, str]:
        """The reference model and the critic's start, where they are set."""
        named = {"grpo.reference": self.grpo.reference, "critic.model": self.critic.model}
        return {key: name for key, name in named.items() if name is not None}

    def scalar(self, model: str) -> list[str]:
        """The critic, where the algorithm has one."""
        return [self.critic.model or model] if self.load_algorithm().needs_critic else []

    def starts_reference(self, algorithm: Algorithm) -> bool:
        """Whether the run has a reference model of its own."""
        return algorithm.needs_reference and self.services.ref_model is not None

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
            return load_algorithm(self.algorithm, known=AlgorithmConfig.model_fields, **settings)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def shares(self, algorithm: Algorithm) -> dict[str, Any]:
        """How tokens share the loss, for `forge.data.packing.pack`."""
        aggregation = self.training.aggregation or algorithm.aggregation
        horizon = (self.grpo.horizon or self.grpo.max_tokens) if aggregation == "fixed_horizon" else None
        return {"aggregation": aggregation, "horizon": horizon}

    def _check(self) -> None:
        super()._check()
        algorithm, algo, unset = self.load_algorithm(), self.grpo, AlgorithmConfig()
        aggregation, updates = self.shares(algorithm)["aggregation"], self.training.mini_batches * self.training.epochs
        corrected, interval = algo.correction or "none", self.training.sync_interval
        if self.async_.max_policy_age is None:
            self.async_.max_policy_age = 0 if self.colocated else interval
        age = self.async_.max_policy_age
        if self.services.ref_model is None and (algorithm.needs_teacher or algo.reference is not None):
            self.services.ref_model = Options()
        recorded = algorithm.beta > 0 and self.services.ref_model is None and not isinstance(algorithm, OwnLoss)
        for bad, message in (
            (
                algo.n_samples < 2 and algorithm.within_group,
                f"grpo.n_samples must be at least 2: {self.algorithm} compares the samples of a prompt with one "
                "another, and one sample has nothing to be compared with",
            ),
            (
                self.colocated and age != 0,
                "colocated: trainer and generator take turns, so async.max_policy_age must be 0",
            ),
            (algo.max_tokens >= self.training.seq_len, "training.seq_len must exceed grpo.max_tokens"),
            (
                age < interval - 1,
                f"training.sync_interval = {interval} makes weights older than async.max_policy_age = {age} allows: "
                f"raise it to at least {interval - 1}",
            ),
            (
                algo.horizon is not None and aggregation != "fixed_horizon",
                f"grpo.horizon does something under aggregation fixed_horizon only: this is {aggregation}",
            ),
            (
                algorithm.fixed_aggregation and aggregation != algorithm.aggregation,
                f"{self.algorithm} means something under training.aggregation {algorithm.aggregation} only",
            ),
            (
                algorithm.on_policy and updates > 1,
                f"{self.algorithm} takes every sample as the policy's own, which holds for the first update of a step "
                "only: set grpo.clip_ratio or grpo.correction, or make one update",
            ),
            (
                not algorithm.beta and bool({"kl", "kl_in"} & algo.settings().keys()),
                "grpo.kl and grpo.kl_in do nothing: grpo.beta is 0",
            ),
            (
                not algorithm.uses_rewards and algo.overlong_buffer > 0,
                f"grpo.overlong_buffer does nothing: {self.algorithm} does not look at rewards",
            ),
            (
                self.reward.gives_steps and not algorithm.needs_critic,
                f"reward.functions rewards steps, and {self.algorithm} sees only their sum: use algorithm ppo, whose "
                "critic assigns them",
            ),
            (algo.overlong_buffer >= algo.max_tokens, "grpo.overlong_buffer must be below grpo.max_tokens"),
            (
                not algorithm.needs_reference and algo.reference is not None,
                "grpo.reference is set and nothing uses it: grpo.beta is 0",
            ),
            (
                not algorithm.needs_reference and self.services.ref_model is not None,
                "services.ref_model is set and nothing uses it: grpo.beta is 0",
            ),
            (
                recorded and (algorithm.kl_in == "reward" or (age == 0 and updates == 1)),
                "grpo.beta does nothing: without services.ref_model the KL is to the weights that sampled, which are "
                "those in training; set services.ref_model to {} for a frozen reference, on the CPU unless it has GPUs",
            ),
            (
                algorithm.needs_teacher and algo.reference is None,
                f"algorithm {self.algorithm} needs grpo.reference: the teacher's folder or hub id",
            ),
            (
                not algorithm.needs_critic and (self.critic != CriticConfig() or self.services.critic != Options()),
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
        needed = {"critic": algorithm.needs_critic, "ref_model": self.starts_reference(algorithm)}
        self.check_services(idle=tuple(name for name in needed if not needed[name]))
        room = self.training.seq_len - algo.max_tokens
        together = f"dataset.max_prompt_tokens and grpo.max_tokens together exceed training.seq_len: at most {room}"
        self.dataset.bound("max_prompt_tokens", room, together)
        self._check_multi_turn() if self.multi_turn else self._check_single_turn()
        if self.eval.every % interval:
            raise ConfigError(
                "eval.every must be a multiple of training.sync_interval: only then are the weights in use"
            )

    def _check_single_turn(self) -> None:
        if self.episode != EpisodeConfig():
            raise ConfigError("episode does nothing: environment is not set")

    def _check_multi_turn(self) -> None:
        if self.environment is not None:
            self.make_environment()
        if self.episode.max_tokens is None:
            self.episode.max_tokens = self.training.seq_len
        for bad, message in (
            (
                self.episode.max_tokens > self.training.seq_len,
                f"episode.max_tokens must be at most training.seq_len = {self.training.seq_len}",
            ),
            (self.reward != RewardConfig(), "reward does nothing: the environment scores"),
            (self.services.reward != Options(), "services.reward does nothing: the environment scores"),
            (
                self.grpo.overlong_buffer != 0,
                "grpo.overlong_buffer does nothing: an episode's length is not that of an answer",
            ),
            (
                bool(self.dataset.chat_template),
                "dataset.chat_template must be false: episode.template makes the tokens",
            ),
        ):
            if bad:
                raise ConfigError(message)

    def limits(self) -> dict[str, Any]:
        """Of an episode, for `forge.envs.MultiTurnEnv`."""
        return {"max_turn_tokens": self.grpo.max_tokens, **self.episode.limits()}

    def reach(self, config: Any) -> int:
        """As the base, of what the generator makes."""
        return min(super().reach(config), check_length(config, self.generator.max_seq_len))

    def check_tokenizer(self, model: str) -> None:
        """ConfigError: the chat template does not fit `episode`, or episodes are longer than generators take."""
        most = longest_sequence(self, model)
        if not self.multi_turn:
            if self.grpo.max_tokens >= most and "max_tokens" not in self.grpo.model_fields_set:
                log.warning(
                    "grpo.max_tokens = %d by default: answers end at the model's %d", self.grpo.max_tokens, most
                )
            return
        self.episode.dialogue(model)
        if self.limits()["max_tokens"] > most:
            raise ConfigError(
                f"episode.max_tokens = {self.episode.max_tokens} (null: training.seq_len) is more than the {most} "
                "tokens that generators take: lower it, or raise generator.max_seq_len as far as the model allows"
            )

    def data(self, model: str) -> RowsConfig:
        """The data, whose prompts leave room for a completion. ConfigError: there is none."""
        return self.prompts(model) if self.multi_turn else with_room(self, "grpo", model)

    def check_reward(self) -> None:
        """As the base; an environment scores by itself."""
        if self.multi_turn:
            return
        super().check_reward()
        if self.reward.functions is None and self.reward.verifiers is None:
            log.warning(
                "reward is not set: MathReward scores responses, by whether they are mathematically equal to "
                "dataset.target_field"
            )

    @property
    def files(self) -> list[str]:
        """Files of the data, the reward and the episode's template."""
        return [*super().files, *(self.episode.files if self.multi_turn else ())]


GRPOConfig = RLConfig
