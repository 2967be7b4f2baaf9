"""A batch cut into parts that each make an update of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ..types import Batch


@dataclass(slots=True, kw_only=True)
class Started(Batch):
    """A batch with the log-probabilities of its tokens under the policy that its step starts from: [tokens]."""

    proximal_logprobs: np.ndarray

    @classmethod
    def of(cls, batch: Batch, proximal_logprobs: np.ndarray) -> Started:
        known: dict[str, Any] = {field.name: getattr(batch, field.name) for field in fields(Batch)}
        return cls(**known, proximal_logprobs=proximal_logprobs)

    def select(self, sequences: np.ndarray) -> Batch:
        """As that of a batch."""
        parts = np.split(self.proximal_logprobs, np.cumsum(self.lengths)[:-1])
        return Started.of(Batch.select(self, sequences), np.concatenate([parts[i] for i in sequences]))


def mini_batches(batch: Batch, parts: int, seed: tuple[int, ...]) -> Iterator[Batch]:
    """The batch in `parts` parts of about as many units (sequences, or what belongs together), drawn by `seed`.

    The weights of a part are multiplied so that their sum is that of the batch: an update then has the size that it
    would have if its part were all there is, however many parts there are. A part of weight 0 has nothing to train and
    is left out: it would move the weights all the same, by the optimiser's momentum and decay. So are empty parts,
    where there are fewer units than parts. Every rank that asks gets the same.

    ValueError: no token of the batch has a weight.
    """
    if parts == 1:
        yield batch
        return
    total = batch.weights.sum(dtype=np.float64)
    if not total:
        raise ValueError("all weights of this batch are 0: there is nothing to train")
    order = np.random.default_rng(seed).permutation(len(batch) // batch.unit)
    for units in np.array_split(order, parts):
        if not len(units):
            continue
        # In the order of the batch, so that how a part is laid out does not depend on how it was drawn.
        part = batch.select((np.sort(units)[:, None] * batch.unit + np.arange(batch.unit)).ravel())
        own = part.weights.sum(dtype=np.float64)
        if own:
            yield replace(part, weights=(part.weights * (total / own)).astype(np.float32))
