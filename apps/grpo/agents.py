"""What a run can be told whose policy acts in an environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from apps.grpo.config import AlgorithmConfig, GRPOConfig, Services
from forge.config import ConfigError
from forge.engines.interface import LONGEST
from forge.envs.config import EpisodeConfig
from forge.sections import RewardConfig


@dataclass
class AgentConfig(GRPOConfig):
    """As of `apps.grpo`, with environments in place of `reward`. `grpo.max_tokens` are those of one turn."""

    episode: EpisodeConfig = field(default_factory=EpisodeConfig)

    def validate(self) -> None:
        super().validate()
        self.episode.validate(self.training.seq_len)
        for bad, message in (
            (self.reward != RewardConfig(), "reward does nothing: the environment scores"),
            (self.services.reward != Services().reward, "services.reward does nothing: the environment scores"),
            (
                self.grpo.overlong_buffer != AlgorithmConfig.overlong_buffer,
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
        """Of an episode, for `forge.actors.Agent`."""
        return {"max_turn_tokens": self.grpo.max_tokens, **self.episode.limits()}

    def check_tokenizer(self, model: str) -> None:
        from transformers import AutoConfig

        self.episode.dialogue(model)
        holds = self.generator.max_seq_len or min(LONGEST, AutoConfig.from_pretrained(model).max_position_embeddings)
        if self.limits()["max_tokens"] > holds:
            raise ConfigError(
                f"episode.max_tokens = {self.episode.max_tokens} (null: training.seq_len) is more than the {holds} "
                "tokens that generators take: lower it, or raise generator.max_seq_len as far as the model allows"
            )

    def check_reward(self) -> None:
        """The environment's is its own."""

    @property
    def files(self) -> list[str]:
        return [*super().files, *self.episode.files]
