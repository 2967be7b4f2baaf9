"""Experiment trackers: TensorBoard, Weights & Biases, and one of a user's own.

A thread of the controller follows the files of a run, and hands each step to the trackers of its configuration.
"""

from .tracker import Delivery, check_trackers

__all__ = ["Delivery", "check_trackers"]
