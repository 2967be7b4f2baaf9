"""Fixtures of the trainer's tests."""

from tests.training.conftest import classifier, mild, model, models, published, untied

__all__ = ["classifier", "mild", "model", "models", "published", "untied"]
