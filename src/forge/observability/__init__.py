"""What a run records about itself: metrics, time by phase, and where they are written."""

from .metrics import Reduce, phase, record_metric
from .run import Run

__all__ = ["Reduce", "Run", "phase", "record_metric"]
