from forge.recipes.distill_config import DistillConfig

__all__ = ["DistillConfig"]
