"""Equality of two answers by math-verify, as a program of `helper_process`."""

import logging
from functools import cache

from math_verify import parse, verify

logging.disable()  # it warns that its own time limits are off: the process has one


def are_equal(answer: str, target: str) -> bool:
    """Return whether math-verify finds the answer equal to the target."""
    sides = [parse(f"${text}$", parsing_timeout=None) for text in (target, answer)]
    return bool(verify(*sides, timeout_seconds=None))


@cache
def _load_parsers() -> None:
    are_equal(r"\frac{1}{2}x", "x/2")


def prepare_question(line: str) -> None:
    """Load math-verify's parsers at the first question, whatever its `line` is."""
    _load_parsers()
