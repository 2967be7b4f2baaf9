"""Metrics, time by phase, and the run's folder that they are written to."""

from .metrics import Reduce, phase, record_metric
from .run import Run

__all__ = ["Reduce", "Run", "phase", "record_metric"]
