"""A small model and a weight store."""

from tests.actors.conftest import model, store  # noqa: F401
