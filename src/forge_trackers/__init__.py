"""Experiment trackers: TensorBoard, Weights & Biases, Trackio and MLflow.

Threads of the controller follow the files of a run. After the run,

    python -m forge_trackers runs/x

delivers the rows that a tracker lacks.
"""

from .settings import check_trackers

__all__ = ["check_trackers"]
