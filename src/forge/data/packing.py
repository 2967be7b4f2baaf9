"""From episodes to packed batches, and from a batch to the micro-batches of each data-parallel rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from ..types import Batch, Episode

Aggregation = Literal["token_mean", "sequence_mean", "fixed_horizon"]


def pack(
    episodes: Sequence[Episode], *, aggregation: Aggregation = "token_mean", horizon: int | None = None, unit: int = 1
) -> Batch:
    """Lay scored episodes back to back.

    Args:
        aggregation: how tokens share the loss. `token_mean`: every trained token counts the same. `sequence_mean`:
            every episode counts the same, its tokens share its part. `fixed_horizon`: every token counts
            1 / (episodes * `horizon`), however long its episode is (Liu et al. 2025, Dr.GRPO). An episode's `weight`
            multiplies its tokens' shares; in the two means they are taken over weighted tokens or episodes.
        horizon: a number of tokens, for `fixed_horizon` alone; 1 gives sums over tokens.
        unit: so many neighbouring episodes belong together and are never separated.

    Raises:
        ValueError: no episodes, an episode without an advantage, or one that trains its first token (which nothing
            precedes that could predict it); a weight that is negative or not finite, or none above 0; a number of
            episodes that is no multiple of `unit`.
    """
    if not episodes:
        raise ValueError("cannot pack an empty list of episodes")
    for number, episode in enumerate(episodes):
        if episode.advantage is None:
            raise ValueError(f"episode {number} has no advantage: compute advantages before packing")
        if episode.mask[0]:
            raise ValueError(f"episode {number} has no context before its first trained token")
    if len(episodes) % unit:
        raise ValueError(f"{len(episodes)} episodes cannot be packed in units of {unit}")
    share = _shares(episodes, aggregation, horizon)
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
        rewards=_final(episodes),
        origins=frozenset().union(*(episode.origins for episode in episodes)),
        unit=unit,
    )


def split(batch: Batch, *, ranks: int, max_tokens: int, at_least: int = 1) -> list[list[Batch]]:
    """Share a batch out: one list of micro-batches for each data-parallel rank, all lists of one length.

    Units (sequences, or what belongs together) are placed longest first into the lightest micro-batch, so ranks get
    about the same number of tokens. A micro-batch with nothing to train (fewer units than places) holds one unit with
    its mask cleared: every rank takes part in every collective, and it adds exactly nothing to the loss.

    Args:
        ranks: number of data-parallel ranks.
        max_tokens: most tokens of one micro-batch.
        at_least: least number of micro-batches a rank.

    Raises:
        ValueError: a unit is longer than `max_tokens`.
    """
    lengths = batch.lengths.reshape(-1, batch.unit).sum(1)
    longest = int(lengths.max())
    if longest > max_tokens:
        what = "a sequence" if batch.unit == 1 else f"{batch.unit} sequences that belong together, in all"
        raise ValueError(f"{what} of {longest} tokens does not fit into training.seq_len = {max_tokens}")
    per_rank = max(at_least, math.ceil(int(lengths.sum()) / (ranks * max_tokens)))
    while (bins := _place(lengths, ranks * per_rank, max_tokens)) is None:
        per_rank += 1
    filled = [batch.select(_members(sorted(units), batch.unit)) if units else _idle(batch, lengths) for units in bins]
    return [filled[rank::ranks] for rank in range(ranks)]


def _shares(episodes: Sequence[Episode], aggregation: str, horizon: int | None) -> np.ndarray:
    """Every episode's share of the loss for one of its tokens."""
    if (aggregation == "fixed_horizon") != (horizon is not None and horizon > 0):
        raise ValueError(f"fixed_horizon, and nothing else, needs a horizon of at least 1; {aggregation} has {horizon}")
    counts = np.array([sum(episode.mask) for episode in episodes])
    weights = np.array([episode.weight for episode in episodes], np.float64)
    if not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
        raise ValueError("episode weights must be finite and at least 0, and one of them above 0")
    if aggregation == "token_mean":
        return weights / ((weights * counts).sum() or 1.0)
    if aggregation == "sequence_mean":
        return weights / weights.sum() / np.maximum(1, counts)
    if horizon is not None:
        return weights / (len(episodes) * horizon)
    raise ValueError(f"unknown aggregation {aggregation!r}: use token_mean, sequence_mean or fixed_horizon")


def _final(episodes: Sequence[Episode]) -> np.ndarray | None:
    """Rewards at the last tokens of the turns that they are for, and what is left at the last trained one; None if an
    episode has no reward."""
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    if len(rewards) < len(episodes):
        return None
    rows = [np.zeros(len(episode.tokens), np.float32) for episode in episodes]
    for row, episode, left in zip(rows, episodes, rewards, strict=True):
        for turn in episode.turns:
            row[turn.end - 1] += turn.reward
            left -= turn.reward
        if any(episode.mask):
            row[max(i for i, own in enumerate(episode.mask) if own)] += left
    return np.concatenate(rows)


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


def _members(units: list[int], size: int) -> np.ndarray:
    """The indices of the sequences of these units."""
    return (np.array(units)[:, None] * size + np.arange(size)).ravel()


def _idle(batch: Batch, lengths: np.ndarray) -> Batch:
    idle = batch.select(_members([int(lengths.argmin())], batch.unit))
    idle.mask = np.zeros_like(idle.mask)
    idle.weights = np.zeros_like(idle.weights)
    return idle


def _flat(rows: Sequence[Sequence], dtype) -> np.ndarray:
    return np.concatenate([np.asarray(row, dtype=dtype) for row in rows])
