"""Models: finding one, its files, layers and layouts of weights, and the cost of computing it."""

from .architecture import FAMILIES
from .find import build_small_model, check_family, quiet_loading, resolve_model
from .tokenizer import open_tokenizer

__all__ = ["FAMILIES", "build_small_model", "check_family", "open_tokenizer", "quiet_loading", "resolve_model"]
