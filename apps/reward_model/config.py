from forge.recipes.reward_model_config import RewardModelConfig

__all__ = ["RewardModelConfig"]
