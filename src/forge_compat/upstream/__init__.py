"""Functions of Meta's torchforge that have another form here; `forge.util` and its modules are aliases of this module.

from forge.util.config import parse
from forge.util.ops import compute_logprobs
"""

import argparse
import functools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from forge_compat.torchforge_files import Settings, read_upstream

Scalar = int | float


def parse(main: Callable[[Settings], object]) -> Callable[[], NoReturn]:
    """Return a function of a configuration as a program: `program --config FILE section.key=value ~section.key`.

    The function gets the file's values, with interpolations resolved, as attributes and keys of a dict:
    `cfg.trainer.training.steps`, `cfg.get("x")`, `**cfg.dataset`. Invalid input ends the program with one line.
    """

    @functools.wraps(main)
    def run_program() -> NoReturn:
        parser = argparse.ArgumentParser(description=main.__doc__)
        parser.add_argument("--config", type=Path, required=True, help="YAML file")
        # Overrides have no dashes, as in torchforge; argparse reports one that has.
        parser.add_argument("overrides", nargs="*", help="section.key=value")
        args = parser.parse_args()
        try:
            values = read_upstream(args.config, args.overrides)
        except (ValueError, OSError) as error:
            raise SystemExit(f"error: {error}") from None
        sys.exit(main(Settings(values)))  # type: ignore[arg-type]  # its value is the exit code, as in torchforge

    return run_program


def get_world_size_and_rank() -> tuple[int, int]:
    """Return the size of the default process group and this process's rank in it; (1, 0) without a group."""
    if not dist.is_available() or not dist.is_initialized():
        return 1, 0
    return dist.get_world_size(), dist.get_rank()


def get_logger(level: str | None = None) -> logging.Logger:
    """Return the logger of this library, set to a level such as "DEBUG"; None keeps its level."""
    logger = logging.getLogger("forge")
    if level is not None:
        logger.setLevel(level.upper())
    return logger


def log_rank_zero(logger: logging.Logger, msg: str, level: int = logging.INFO) -> None:
    """Log a message in rank 0 only."""
    if get_world_size_and_rank()[1] == 0:
        logger.log(level, msg, stacklevel=2)


@functools.lru_cache(maxsize=1024)
def log_once(logger: logging.Logger, msg: str, level: int = logging.INFO) -> None:
    """Log a message in rank 0 only, and only the first time in this process."""
    log_rank_zero(logger, msg, level)


class TokenLogits:
    """Placeholder for the logits argument of a torchforge loss, which only `compute_logprobs` can read.

    The logits of a batch are [rows, length, vocabulary]; the trainer computes only what a loss needs.

    Args:
        logprobs: log-probabilities [rows, tokens] of the responses, with their gradient.
        tokens: ids of the responses, [rows, tokens].
    """

    def __init__(self, logprobs: Tensor, tokens: Tensor) -> None:
        self.logprobs, self.tokens = logprobs, tokens

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"logits have no attribute {name!r} in forge: call forge.util.ops.compute_logprobs(logits, response)"
        )


def compute_logprobs(
    logits: Tensor | TokenLogits, input_ids: Tensor, temperature: float = 1.0, align: bool = True
) -> Tensor:
    """Return the log-probabilities of tokens, [rows, tokens] in float32.

    Args:
        logits: [rows, length, vocabulary], or what a loss gets instead of them in `TitanTrainer`.
        input_ids: [rows, tokens] ids of the tokens.
        temperature: by which the logits are divided.
        align: if True, the tokens are the last ones of the sequences that the logits are of, so each is predicted by
            the logits at the position before it; if False, by the logits at the same index, and length is tokens.

    Raises:
        ValueError: the logits are a trainer's, and the tokens are not the responses, or the temperature is not 1.
    """
    if isinstance(logits, TokenLogits):
        if temperature != 1.0 or not torch.equal(input_ids, logits.tokens):
            raise ValueError("compute_logprobs in a loss needs input_ids of the responses and temperature 1")
        return logits.logprobs
    count = input_ids.shape[1]
    if align:
        logits = logits[:, -count - 1 : -1].to(input_ids.device)
    # In float32 before the sum over the vocabulary, which bfloat16 would round to three digits.
    return (logits / temperature).float().log_softmax(-1).gather(-1, input_ids.long().unsqueeze(-1)).squeeze(-1)
