from forge.recipes.sft_config import SFTConfig

__all__ = ["SFTConfig"]
