from forge.recipes.dpo_config import DPOConfig

__all__ = ["DPOConfig"]
