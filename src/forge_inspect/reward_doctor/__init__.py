"""Examines a reward before a run pays with it: answers that should earn nothing, and calls that should not fail."""

from .examine import Examination, Finding, examine

__all__ = ["Examination", "Finding", "examine"]
