"""Experiment trackers: TensorBoard, Weights & Biases, Trackio and MLflow.

They run in one process beside the controller, which follows metrics.jsonl and rollouts.arrow in the run's folder. A
tracker that fails or hangs cannot stop or slow down training: its rows are in the files, and it retries. The process
ends when the controller closes its standard input, or dies. After the run,

    python -m forge.observability.trackers runs/x

delivers the rows that the trackers of a finished run lack.
"""

from .settings import check_trackers, wandb_mode

__all__ = ["check_trackers", "wandb_mode"]
