"""From episodes to packed batches, and from a batch to the micro-batches of each data-parallel rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from ..types import Batch, Episode

Aggregation = Literal["token_mean", "sequence_mean"]


def pack(episodes: Sequence[Episode], *, aggregation: Aggregation = "token_mean") -> Batch:
    """Lay scored episodes back to back.

    Args:
        aggregation: how tokens share the loss. `token_mean`: every trained token counts the same. `sequence_mean`:
            every episode counts the same, its tokens share its part.

    Raises:
        ValueError: no episodes, an episode without an advantage, or one that trains its first token (which nothing
            precedes that could predict it).
    """
    if not episodes:
        raise ValueError("cannot pack an empty list of episodes")
    for number, episode in enumerate(episodes):
        if episode.advantage is None:
            raise ValueError(f"episode {number} has no advantage: compute advantages before packing")
        if episode.mask[0]:
            raise ValueError(f"episode {number} has no context before its first trained token")
    counts = np.array([sum(episode.mask) for episode in episodes])
    if aggregation == "token_mean":
        share = np.full(len(episodes), 1.0 / max(1, counts.sum()))
    elif aggregation == "sequence_mean":
        share = 1.0 / (np.maximum(1, counts) * len(episodes))
    else:
        raise ValueError(f"unknown aggregation {aggregation!r}: use token_mean or sequence_mean")
    mask = _flat([episode.mask for episode in episodes], np.bool_)
    lengths = np.array([len(episode.tokens) for episode in episodes])
    logprobs = [
        e.logprobs if e.logprobs is not None else [math.nan if own else 0.0 for own in e.mask] for e in episodes
    ]
    return Batch(
        tokens=_flat([episode.tokens for episode in episodes], np.int64),
        lengths=lengths,
        mask=mask,
        logprobs=_flat(logprobs, np.float32),
        versions=_flat([episode.versions for episode in episodes], np.int64),
        advantages=np.repeat(np.array([e.advantage for e in episodes], np.float32), lengths) * mask,
        weights=np.repeat(share.astype(np.float32), lengths) * mask,
        origins=frozenset().union(*(episode.origins for episode in episodes)),
    )


def split(batch: Batch, *, ranks: int, max_tokens: int, at_least: int = 1) -> list[list[Batch]]:
    """Share a batch out: one list of micro-batches for each data-parallel rank, all lists of one length.

    Sequences are placed longest first into the lightest micro-batch, so ranks get about the same number of tokens.
    A micro-batch with nothing to train (fewer sequences than places) holds one sequence with its mask cleared: every
    rank takes part in every collective, and it adds exactly nothing to the loss.

    Args:
        ranks: number of data-parallel ranks.
        max_tokens: most tokens of one micro-batch.
        at_least: least number of micro-batches a rank.

    Raises:
        ValueError: a sequence is longer than `max_tokens`.
    """
    longest = int(batch.lengths.max())
    if longest > max_tokens:
        raise ValueError(f"a sequence of {longest} tokens does not fit into training.seq_len = {max_tokens}")
    per_rank = max(at_least, math.ceil(int(batch.lengths.sum()) / (ranks * max_tokens)))
    while (bins := _place(batch.lengths, ranks * per_rank, max_tokens)) is None:
        per_rank += 1
    filled = [batch.select(np.array(sorted(members))) if members else _idle(batch) for members in bins]
    return [filled[rank::ranks] for rank in range(ranks)]


def _place(lengths: np.ndarray, places: int, max_tokens: int) -> list[list[int]] | None:
    """Greedy longest-first placement; None if it does not fit."""
    bins: list[list[int]] = [[] for _ in range(places)]
    load = np.zeros(places, dtype=np.int64)
    for sequence in np.argsort(-lengths, kind="stable"):
        lightest = int(load.argmin())
        load[lightest] += lengths[sequence]
        if load[lightest] > max_tokens:
            return None
        bins[lightest].append(int(sequence))
    return bins


def _idle(batch: Batch) -> Batch:
    idle = batch.select(np.array([int(batch.lengths.argmin())]))
    idle.mask = np.zeros_like(idle.mask)
    idle.weights = np.zeros_like(idle.weights)
    return idle


def _flat(rows: Sequence[Sequence], dtype) -> np.ndarray:
    return np.concatenate([np.asarray(row, dtype=dtype) for row in rows])
