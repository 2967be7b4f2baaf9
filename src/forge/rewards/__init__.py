"""Rewards: functions and verifiers that score responses. An unscored response is NaN with a reason, never 0."""

from .verifier import Scores, Unscored, Verifier

__all__ = ["Scores", "Unscored", "Verifier"]
