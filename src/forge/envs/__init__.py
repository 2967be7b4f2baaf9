"""Groups of scored answers, as recipes play and evaluate them. `forge_envs` has episodes of several turns."""

from .group import GroupEnv, PolicyService, SingleTurnEnv

__all__ = ["GroupEnv", "PolicyService", "SingleTurnEnv"]
