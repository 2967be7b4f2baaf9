"""The components of a run: thin actors around plain libraries, which the controller places and calls."""

from .dataset import DatasetActor
from .generator import Generator
from .reference import ReferenceModel
from .replay_buffer import ReplayBuffer
from .reward import RewardActor
from .trainer import Trainer

PolicyActor = Generator  # the name in the torchforge documents

__all__ = [
    "DatasetActor",
    "Generator",
    "PolicyActor",
    "ReferenceModel",
    "ReplayBuffer",
    "RewardActor",
    "Trainer",
]
