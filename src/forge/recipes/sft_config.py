"""Configuration of supervised fine-tuning."""

from __future__ import annotations

from pydantic import PositiveInt

from ..data.config import SupervisedConfig
from ..engines.settings import EngineSettings
from . import preflight
from .eval_config import EvalConfig
from .schema import RecipeConfig


class SFTEvalConfig(EvalConfig):
    """Held-out loss and, with `accuracy`, the share of right greedy answers: conversations are continued at the last
    turn of the assistant."""

    accuracy: bool = True
    """Generate answers, which the reward judges."""
    max_tokens: PositiveInt = 512
    """Most tokens of an answer."""
    stop_at: float = 1.1
    """Training ends once accuracy reaches it."""


class SFTConfig(RecipeConfig):
    """Supervised fine-tuning."""

    dataset: SupervisedConfig
    eval: SFTEvalConfig = SFTEvalConfig()

    def _check(self) -> None:
        super()._check()
        self.check_offline()
        self.check_services()
        self.dataset.bound("max_tokens", self.training.seq_len, "dataset.max_tokens must not exceed training.seq_len")
        preflight.check(preflight.SFT_RULES, self)

    @property
    def engine(self) -> EngineSettings | None:
        """The engine that answers held-out problems, where it is to."""
        return self.generator if self.eval.accuracy else None

    @property
    def generates(self) -> bool:
        """Whether evaluations generate answers."""
        return self.eval.accuracy and self.eval.problems > 0
