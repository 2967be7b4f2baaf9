"""What fixed weights say of the tokens of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..types import Batch
from .distributed import Ranks
from .named import call_by_name


@torch.no_grad()
def score(of: Callable[[Batch], Tensor], batch: Batch, *, max_tokens: int, ranks: Ranks | None = None) -> np.ndarray:
    """One number for every token with mask True, 0 elsewhere; [tokens], float32.

    Args:
        of: the numbers of a part's tokens with mask True, [trained].
        max_tokens: most tokens in one forward pass, unless a single sequence has more.
        ranks: share the work; all of them must call this with the same batch, and all get the whole answer.
    """
    rank, world_size = (ranks.data.rank, ranks.data.size) if ranks is not None else (0, 1)
    share = math.ceil(len(batch.tokens) / world_size)
    runs = consecutive(batch.lengths, min(max_tokens, share))
    starts = np.concatenate([[0], np.cumsum(batch.lengths)])
    out = np.zeros(len(batch.tokens), dtype=np.float32)
    for turn in range(0, len(runs), world_size):
        # Where the runs do not go round, the last is computed again: every rank takes part in every collective.
        sequences = runs[min(turn + rank, len(runs) - 1)]
        part = batch.select(sequences)
        numbers = of(part).float().cpu().numpy()
        if turn + rank < len(runs):
            out[starts[sequences[0]] : starts[sequences[-1] + 1]][part.mask] = numbers
    if ranks is None or world_size == 1:
        return out
    return ranks.sum(torch.from_numpy(out).to(ranks.device)).cpu().numpy()


def consecutive(lengths: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Runs of neighbouring sequences of at most `max_tokens` tokens in all (at least one sequence each)."""
    runs: list[list[int]] = [[]]
    filled = 0
    for sequence, length in enumerate(lengths.tolist()):
        if runs[-1] and filled + length > max_tokens:
            runs.append([])
            filled = 0
        runs[-1].append(sequence)
        filled += length
    return [np.array(run) for run in runs]


def evaluate_pairs(loss: Callable[..., Any], batch: Batch, **answers: np.ndarray) -> dict[str, float]:
    """`eval/loss` of held-out pairs, and the mean of every metric of the loss over them.

    Args:
        loss: over named tensors, with `metrics`: `forge.losses.DPOLoss` or `forge.losses.BradleyTerryLoss`.
        batch: the pairs, packed as for training; with `ref_logprobs` if the loss takes them.
        answers: what the trainer computed for the batch, by the name that the loss has for it: `logprobs`, or `values`
            of a reward head; [tokens].

    Raises:
        ValueError: the loss takes a tensor that is not there.
    """
    arrays = {
        "weights": batch.weights,
        "sequences": np.repeat(np.arange(len(batch)), batch.lengths),
        "ref_logprobs": batch.ref_logprobs,
        **answers,
    }
    named = {name: None if given is None else torch.from_numpy(given[batch.mask]) for name, given in arrays.items()}
    each = call_by_name(loss.metrics, named)  # type: ignore[attr-defined]
    means = {f"eval/{name}": float(values.double().mean()) for name, values in each.items()}
    return {"eval/loss": float(call_by_name(loss, named)), **means}
