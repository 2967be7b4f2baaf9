"""Experiment trackers: TensorBoard, Weights & Biases, and classes of the user.

A thread of the controller follows the files of a run, and passes each step to the trackers of its configuration.
"""

from .tracker import Delivery, check_trackers

__all__ = ["Delivery", "check_trackers"]
