"""Verifiers that score responses: rules, reward models, process reward models and judges, alone or as a panel.

Each verifier has its own scale. The score of a response that cannot be scored is NaN with a reason, never 0.
"""

from typing import TYPE_CHECKING, Any

from .panel import Panel
from .process import ProcessRewardModel, StepRewards
from .reward_model import RewardModel
from .rule_verifiers import AnswerFrequency, MathVerifier, Rule

if TYPE_CHECKING:
    from .judge import LMJudge

__all__ = [
    "AnswerFrequency",
    "LMJudge",
    "MathVerifier",
    "Panel",
    "ProcessRewardModel",
    "RewardModel",
    "Rule",
    "StepRewards",
]


def __getattr__(name: str) -> Any:
    if name == "LMJudge":  # imported on first use: judges need the openai package
        from .judge import LMJudge

        return LMJudge
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
