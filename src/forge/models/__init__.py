"""What a model is: where it is found, its files, layers and layouts of weights, and what it costs to compute."""

from .find import FAMILIES, build_small_model, check_family, quiet_loading, resolve_model
from .tokenizer import open_tokenizer

__all__ = ["FAMILIES", "build_small_model", "check_family", "open_tokenizer", "quiet_loading", "resolve_model"]
