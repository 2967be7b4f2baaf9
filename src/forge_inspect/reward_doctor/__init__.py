"""Examine a reward before a run uses it: with answers that should earn nothing, and calls that should not fail."""

from .examine import Examination, Finding, examine

__all__ = ["Examination", "Finding", "examine"]
