"""`ReinforceLoss` under the path of the torchforge documents."""

from ..algorithms import Reinforce as ReinforceLoss

__all__ = ["ReinforceLoss"]
