from forge.recipes.rl_config import GRPOConfig

__all__ = ["GRPOConfig"]
