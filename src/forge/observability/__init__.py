"""What a run records about itself: metrics, time by phase, and where they are written."""

from .metrics import Reduce, phase, record_metric

__all__ = ["Reduce", "phase", "record_metric"]
