"""Verifiers and their panel: rules, reward models, models of steps, judges, each on its own scale.

An unscored response is NaN with a reason, never 0.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .cache import Cache
from .panel import Panel
from .process import StepRewards
from .rule_verifiers import AnswerFrequency, MathVerifier, Rule

if TYPE_CHECKING:
    from .judge import LMJudge
    from .process import ProcessRewardModel
    from .reward_model import RewardModel

__all__ = [
    "AnswerFrequency",
    "Cache",
    "LMJudge",
    "MathVerifier",
    "Panel",
    "ProcessRewardModel",
    "RewardModel",
    "Rule",
    "StepRewards",
]

# Imported on first use: torch takes seconds, judges need an extra.
_LATER = {"LMJudge": "judge", "ProcessRewardModel": "process", "RewardModel": "reward_model"}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f".{_LATER[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
