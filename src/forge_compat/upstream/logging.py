"""`forge.util.logging` of torchforge, on Python's own."""

from __future__ import annotations

import logging
from functools import lru_cache

from .distributed import get_world_size_and_rank


def get_logger(level: str | None = None) -> logging.Logger:
    """The logger of this library, at a level such as "DEBUG"; None leaves its level."""
    logger = logging.getLogger("forge")
    if level is not None:
        logger.setLevel(level.upper())
    return logger


def log_rank_zero(logger: logging.Logger, msg: str, level: int = logging.INFO) -> None:
    """Log a message in rank 0 alone."""
    if get_world_size_and_rank()[1] == 0:
        logger.log(level, msg, stacklevel=2)


@lru_cache(maxsize=1024)
def log_once(logger: logging.Logger, msg: str, level: int = logging.INFO) -> None:
    """Log a message in rank 0 alone, and only the first time in this process."""
    log_rank_zero(logger, msg, level)
