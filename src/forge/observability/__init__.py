"""Metrics, time by phase, and the folder of a run that they are written to."""

from ..system.extras import find_foreign_name as __getattr__  # noqa: F401  (other names of torchforge)
from .metrics import Reduce, metrics_of, phase, record_metric, record_values
from .run import Run

__all__ = ["Reduce", "Run", "metrics_of", "phase", "record_metric", "record_values"]
