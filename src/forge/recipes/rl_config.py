"""Configuration of the reinforcement-learning recipe, with a reward or with environments."""

from typing import Any, ClassVar, Literal, cast

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from ..algorithms import Algorithm, Correction, load_algorithm
from ..config.plugin import explain_names, resolve
from ..config.sections import ConfigError, Section
from ..data.config import DatasetConfig, RowsConfig
from ..engines.interface import check_length
from ..envs.config import EpisodeConfig
from ..envs.group import GroupEnv
from ..observability.console import log
from ..runtime.controller import Placement
from . import rules
from .eval_config import RLEvalConfig
from .metrics_config import MetricsConfig
from .schema import RecipeConfig, SamplingServices, limit_prompt_tokens, longest_sequence


class RolloutSettings(Section):
    """Bounds of sampling, of rollouts and evaluations. The log-probabilities that are recorded and trained are those of
    the policy at `temperature`, before any of these excludes a token: nothing is renormalised."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the most probable tokens that have this probability together; 1: all."""
    top_k: NonNegativeInt = 0
    """Draw from that many of the most probable tokens; 0: all."""
    repetition_penalty: PositiveFloat = 1.0
    """Above 1, make tokens that prompt or answer have less likely: logits above 0 are divided by it, others
    multiplied."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end an answer, of which they are a part."""

    BOUNDS: ClassVar[tuple[str, ...]] = ("top_p", "top_k", "repetition_penalty")

    @property
    def excluding(self) -> list[str]:
        """Return the names of the settings that are set and exclude or reweight tokens, so that tokens are not drawn
        from the policy's own distribution."""
        # Subclasses may have other defaults.
        defaults = type(self)()
        return [name for name in self.BOUNDS if self[name] != defaults[name]]

    def sampling(self) -> dict[str, Any]:
        """Return the arguments of `forge.types.Sampling` for these settings, as far as they differ from its
        defaults."""
        fields = {name: self[name] for name in self.excluding}
        if self.stop:
            fields["stop"] = tuple(self.stop)
        if self.excluding:
            fields["logprobs_of"] = "policy"
        return fields

    def _check(self) -> None:
        if not all(self.stop):
            raise ValueError("grpo.stop must not contain an empty text: omit it")


class AlgorithmConfig(RolloutSettings):
    """Sampling, and the settings of the algorithm: every field of its class is a key here, such as `clip_high` or
    `beta` ([algorithms.md](algorithms.md)). A setting that the algorithm does not have is an error.

    Log-probabilities are the policy's at `temperature`, whatever is excluded
    ([engines.md](engines.md#restricted-sampling))."""

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
    """So many tokens before `max_tokens` the reward starts to fall, by 1 at the limit."""
    reference: str | None = None
    """The frozen model, or the teacher of `distill`; null: the start."""
    correction: Literal["none", "truncate", "mask"] | None = None
    """Weigh by the trained policy over the sampler, instead of the clip: at most `correction_high` (`truncate`), or 0
    outside `correction_low` to `correction_high` (`mask`) ([asynchrony.md](asynchrony.md))."""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """The ratio of each token, the product over a sequence, or its geometric mean."""
    correction_low: float = 0.5
    """Lower bound of `mask`."""
    correction_high: float = 2.0
    """Upper bound."""
    loss: dict[str, Any] = Field(default_factory=dict)
    """Settings of an algorithm of your own whose names are taken here."""

    def settings(self) -> dict[str, Any]:
        """Return the arguments of the algorithm's constructor that are set, as {field: value}. ConfigError: one is set
        twice, here and in `loss`."""
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
    """Critic of `ppo`, with separate weights."""

    model: str | None = None
    """Null: the policy's start, with a new head."""
    learning_rate: float = Field(1e-5, ge=0)
    """Peak learning rate."""
    clip: PositiveFloat | None = 0.2
    """How far a value may move in one step; null: any."""


# The module of the extension that checks and places the section `models`.
MODELS = "forge_agents.models"


class AsyncConfig(Section):
    """How far sampling runs ahead of training."""

    max_policy_age: int | None = Field(None, ge=0)
    """Maximum staleness of a trained token, in policy versions, which the trainer verifies; 0 is lock-step. Null:
    `training.sync_interval`, or 0 if `colocated`."""
    max_training_age: int | None = Field(None, ge=0)
    """The same bound for what the trainer accepts, where a loop of one's own trains on groups again that the buffer has
    handed out before; null: `max_policy_age`, which remains the bound of sampling."""
    order: Literal["fifo", "random"] = "fifo"
    """Of the replay buffer."""


class RLServices(SamplingServices):
    """Placement of each component."""

    reward: Placement | None = Placement()
    """Null: in the controller's process, for functions that are quick and sure to end."""
    critic: Placement = Placement()
    ref_model: Placement | None = None
    """The frozen model that `grpo.beta` keeps the policy close to. Null: none is started, and the KL is to the
    generator's weights, by the log-probabilities that it recorded."""
    replay_buffer: Placement | None = None
    """Null: in the controller's process."""


class RolloutMetrics(MetricsConfig):
    """Outputs in addition to `metrics.jsonl`, the console and the report ([watching.md](watching.md)), and recorded
    rollouts."""

    rollouts: NonNegativeInt | Literal["all"] = 1
    """Groups of each step that `rollouts.arrow` records with all of their tokens ([watching.md](watching.md)), and as
    many of those that were dropped. `all`: every one."""
    rollouts_mb: PositiveInt = 1000
    """Size at which that file is full."""


class RLConfig(RecipeConfig):
    """Reinforcement learning."""

    unread: ClassVar[tuple[str, ...]] = ()

    dataset: DatasetConfig
    algorithm: Any = "grpo"
    """A name of [algorithms.md](algorithms.md), or `package.module:Name`; from Python also the object itself."""
    grpo: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    async_: AsyncConfig = AsyncConfig()
    environment: Any = None
    """What the policy acts in, instead of `reward`: `package.module:Name`, called without arguments for each episode
    ([environments.md](environments.md)); from Python also the callable itself."""
    episode: EpisodeConfig = EpisodeConfig()
    models: dict[str, Any] = Field(default_factory=dict)
    """Models that the agent of `episode.agent` may ask alongside `policy` ([agent_gateway.md](agent_gateway.md))."""
    eval: RLEvalConfig = RLEvalConfig()
    services: RLServices = RLServices()
    metrics: RolloutMetrics = RolloutMetrics()

    @property
    def multi_turn(self) -> bool:
        """Return whether the policy acts in an environment."""
        return self.environment is not None or self.episode.agent is not None

    def make_environment(self) -> Any:
        """Return the callable that `environment` names, which makes an environment. ConfigError: the name is unknown,
        or not callable."""
        make = resolve(self.environment, "environment") if isinstance(self.environment, str) else self.environment
        if not callable(make):
            raise ConfigError(
                f"environment {self.environment!r} is not callable: name a class or function that makes an environment"
            )
        return make

    def others(self) -> dict[str, str]:
        """Return the reference model, the critic's start and additional models that are set, as {dotted key: folder or
        hub id}."""
        models = {"grpo.reference": self.grpo.reference, "critic.model": self.critic.model}
        models |= {f"models.{name}.model": section.model for name, section in self.models.items()}
        return {key: name for key, name in models.items() if name is not None}

    def placement(self, name: str) -> dict[str, Any]:
        """Return the placement options of a service, such as "trainer", or of a component of an additional model, such
        as "models.rival.trainer"."""
        return self.placements()[name] if name.startswith("models.") else super().placement(name)

    def placements(self) -> dict[str, dict[str, Any]]:
        """Return the placement options of all services and of the components of additional models, by their dotted
        setting."""
        placements = super().placements()
        return placements | resolve(f"{MODELS}:place_models", "models")(self) if self.models else placements

    def scalar(self, model: str) -> list[str]:
        """Return the model that the critic starts from, in a list; empty if the algorithm has no critic."""
        return [self.critic.model or model] if self.load_algorithm().needs_critic else []

    def starts_reference(self, algorithm: Algorithm) -> bool:
        """Return whether the run starts a separate reference model for this algorithm."""
        return algorithm.needs_reference and self.services.ref_model is not None

    @property
    def max_policy_age(self) -> int:
        """Return the maximum age of a sampled token, in policy versions: `async.max_policy_age`, or its default."""
        assert self.async_.max_policy_age is not None  # `_check` sets the default
        return self.async_.max_policy_age

    @property
    def max_training_age(self) -> int:
        """Return the maximum age of a token that the trainer accepts, in policy versions."""
        age = self.async_.max_training_age
        return self.max_policy_age if age is None else age

    @property
    def idle(self) -> frozenset[str]:
        """Return which of the services critic and ref_model the algorithm does not need, by name."""
        algorithm = self.load_algorithm()
        needed = {"critic": algorithm.needs_critic, "ref_model": self.starts_reference(algorithm)}
        return frozenset(name for name, is_needed in needed.items() if not is_needed)

    def load_algorithm(self) -> Algorithm:
        """Return the algorithm that `algorithm` names, constructed with its settings.

        Raises:
            ConfigError: there is no such algorithm, or it does not have a setting, or a value is out of range.
        """
        if isinstance(self.algorithm, dict):
            raise ConfigError(
                f"algorithm must be a name, got {self.algorithm!r:.80}: "
                + (explain_names([f"algorithm.{key}" for key in self.algorithm]) or "docs/algorithms.md lists them")
            )

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
        """Return the arguments `aggregation` and `horizon` of `forge.data.packing.pack`: how tokens share the loss."""
        aggregation = self.training.aggregation or algorithm.aggregation
        horizon = (self.grpo.horizon or self.grpo.max_tokens) if aggregation == "fixed_horizon" else None
        return {"aggregation": aggregation, "horizon": horizon}

    def _check(self) -> None:
        super()._check()
        algorithm = self.load_algorithm()
        interval = self.training.sync_interval

        # Defaults that depend on other settings.
        if self.async_.max_policy_age is None:
            self.async_.max_policy_age = 0 if self.colocated else interval
        if self.services.ref_model is None and (algorithm.needs_teacher or self.grpo.reference is not None):
            self.services.ref_model = Placement()

        rules.check_rules(rules.RL_RULES, self.facts())
        self.check_services()
        longest_prompt = self.training.seq_len - self.grpo.max_tokens
        fault = (
            f"dataset.max_prompt_tokens and grpo.max_tokens together exceed training.seq_len: at most {longest_prompt}"
        )
        self.dataset.limit("max_prompt_tokens", longest_prompt, fault)
        if self.multi_turn:
            self._check_multi_turn()
        if any(every % interval for every in self.eval.intervals().values()):
            raise ConfigError(
                "eval.every must be a multiple of training.sync_interval, because generators get new weights only then"
            )

    def facts(self) -> rules.RLFacts:
        """Return the configuration values that RL_RULES check."""
        algorithm = self.load_algorithm()
        training = self.training
        return rules.RLFacts(
            self,
            algorithm,
            self.shares(algorithm)["aggregation"],
            updates=training.mini_batches * training.epochs,
            interval=training.sync_interval,
            age=self.max_policy_age,
        )

    def unused(self) -> list[str]:
        """Return the dotted keys of settings that are set but have no effect."""
        return super().unused() + self.facts().unused()

    def _check_multi_turn(self) -> None:
        if self.environment is not None:
            self.make_environment()
        if self.episode.agent is not None:
            resolve("forge_agents.recipe:agent_config", "episode.agent")(self.episode.agent)
        if self.episode.max_tokens is None:
            self.episode.max_tokens = self.training.seq_len
        if self.models:
            self.models = resolve(f"{MODELS}:check_models", "models")(self)
        rules.check_rules(rules.MULTI_TURN_RULES, self)

    def multi_turn_env(self, model: str) -> GroupEnv:
        """Return the environment that plays episodes of `environment`, with the tokenizer in the folder `model`.
        ValueError: the chat template does not fit the section `episode`."""
        make_env = resolve("forge_envs:MultiTurnEnv", "environment")
        return cast(GroupEnv, make_env(self.make_environment(), self.episode.dialogue(model), **self.limits()))

    def limits(self) -> dict[str, Any]:
        """Return the limits of an episode, as arguments of `forge_envs.MultiTurnEnv`."""
        return {"max_turn_tokens": self.grpo.max_tokens, **self.episode.limits()}

    def reach(self, config: Any) -> int:
        """Return the maximum number of tokens of a trained sequence, which is also bounded by the generator's."""
        return min(super().reach(config), check_length(config, self.generator.max_seq_len))

    def check_tokenizer(self, model: str) -> None:
        """Check that the chat template fits the section `episode`, and episodes the sequences that generators take.

        Raises:
            ConfigError: one of them does not.
        """
        longest = longest_sequence(self, model)
        if not self.multi_turn:
            if self.grpo.max_tokens >= longest and "max_tokens" not in self.grpo.model_fields_set:
                log.warning(
                    "grpo.max_tokens = %d by default: answers end at the model's %d", self.grpo.max_tokens, longest
                )
            return

        self.episode.dialogue(model)
        if self.limits()["max_tokens"] > longest:
            raise ConfigError(
                f"episode.max_tokens = {self.episode.max_tokens} (null: training.seq_len) is more than the {longest} "
                "tokens that generators take: lower it, or raise generator.max_seq_len as far as the model allows"
            )

    def data(self, model: str) -> RowsConfig:
        """Return a copy of the section `dataset` whose prompts leave space for a completion in the model's sequences.
        ConfigError: there is none."""
        if not self.multi_turn:
            return self.reward.with_columns(limit_prompt_tokens(self, model))
        return self.dataset.cap("max_prompt_tokens", longest_sequence(self, model) - 1)  # room for one token

    def check_reward(self) -> None:
        """Check that what the reward or the agent names exists. ValueError: it does not."""
        if self.episode.agent is not None:
            resolve("forge_agents.recipe:check_agent", "episode.agent")(self.episode.agent)
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
        """Return the paths of the data, the reward and the episode's template that may be local files."""
        return [*super().files, *(self.episode.files if self.multi_turn else ())]
