"""Whole numbers among settings that Python code or a file of another library gives."""

from __future__ import annotations


def whole(value: object, name: str, least: int = 1) -> int:
    """The value, if it is a whole number of at least `least`. ValueError: it is not; names the setting."""
    # A bool passes as an int, and True as 1.
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        remedy = ": remove the quotes" if isinstance(value, str) and value.strip().isdigit() else ""
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r:.80}{remedy}")
    return value
