"""Log-probabilities of a batch under fixed weights."""

from __future__ import annotations

import numpy as np
import torch

from ..types import Batch
from .policy import Policy


@torch.no_grad()
def score(policy: Policy, batch: Batch, *, max_tokens: int, temperature: float = 1.0) -> np.ndarray:
    """Log-probability of every token with mask True, 0 elsewhere; [tokens], float32.

    Every rank of a sharded policy must call this with the same batch and gets the whole answer.

    Args:
        max_tokens: most tokens in one forward pass, unless a single sequence has more.
    """
    out = np.zeros(len(batch.tokens), dtype=np.float32)
    at = 0
    for sequences in consecutive(batch.lengths, max_tokens):
        part = batch.select(sequences)
        logprobs, _entropy = policy(part, temperature)
        out[at : at + len(part.tokens)][part.mask] = logprobs.float().cpu().numpy()
        at += len(part.tokens)
    return out


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
