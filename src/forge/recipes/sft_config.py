"""Configuration of supervised fine-tuning."""

from __future__ import annotations

from pydantic import PositiveInt

from ..config.sections import ConfigError, Section
from ..data.config import SupervisedConfig
from ..engines.settings import EngineSettings
from ..runtime.controller import Options
from .schema import EvalConfig, RecipeConfig, RewardConfig, ServeConfig


class SFTEvalConfig(EvalConfig):
    """Held-out loss and, with `accuracy`, the share of right greedy answers: conversations are continued at the last
    turn of the assistant."""

    accuracy: bool = True
    """Generate answers, which the reward judges."""
    max_tokens: PositiveInt = 512
    """Most tokens of an answer."""
    stop_at: float = 1.1
    """Training ends once accuracy reaches it."""


class Services(Section):
    """Placement of each component."""

    generator: Options = Options()
    trainer: Options = Options()
    reward: Options | None = Options()
    """Null: in the controller's process."""
    dataset: Options | None = None
    """Null: in the controller's process."""


class SFTConfig(RecipeConfig):
    """Supervised fine-tuning."""

    dataset: SupervisedConfig
    eval: SFTEvalConfig = SFTEvalConfig()
    services: Services = Services()

    def _check(self) -> None:
        super()._check()
        self.check_offline()
        self.check_services()
        self.dataset.bound("max_tokens", self.training.seq_len, "dataset.max_tokens must not exceed training.seq_len")
        exam, unset = self.eval.accuracy and self.eval.problems > 0, SFTEvalConfig()
        unread = (self.reward, self.generator, self.serve, self.services.reward, self.services.generator)
        for bad, message in (
            (self.colocated, "colocated does nothing in this recipe: evaluation is the only time that it generates"),
            (
                not exam and unread != (RewardConfig(), EngineSettings(), ServeConfig(), Options(), Options()),
                "reward, generator and serve do nothing: eval.accuracy is false, or eval.problems 0",
            ),
            (
                not exam and (self.eval.stop_at, self.eval.max_tokens) != (unset.stop_at, unset.max_tokens),
                "eval.stop_at and eval.max_tokens do nothing: eval.accuracy is false, or eval.problems 0",
            ),
            (
                exam and self.reward.beyond_accuracy,
                "reward.functions beyond the first and reward.verifiers do nothing here: answers are "
                "right by one function",
            ),
        ):
            if bad:
                raise ConfigError(message)
