"""Fixtures of the engines' tests."""

from tests.engines.conftest import make

__all__ = ["make"]
