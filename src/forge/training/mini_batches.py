"""A batch cut into parts that each make an update of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..types import Batch


def mini_batches(batch: Batch, parts: int, seed: tuple[int, ...]) -> Iterator[Batch]:
    """The batch in `parts` parts of about as many units (sequences, or what belongs together), drawn by `seed`.

    The weights of a part are multiplied by the batch's number of units over its own: its loss is what the batch's would
    be if all of it were like this part, whatever the aggregation. A part of weight 0 has nothing to train and is left
    out: it would move the weights all the same, by the optimiser's momentum and decay. So are empty parts, where there
    are fewer units than parts. Every rank that asks gets the same.

    ValueError: no token of the batch has a weight.
    """
    if parts == 1:
        yield batch
        return
    if not batch.weights.any():
        raise ValueError("all weights of this batch are 0: there is nothing to train")
    order = np.random.default_rng(seed).permutation(len(batch) // batch.unit)
    for units in np.array_split(order, parts):
        if not len(units):
            continue
        # In the order of the batch, so that how a part is laid out does not depend on how it was drawn.
        part = batch.select((np.sort(units)[:, None] * batch.unit + np.arange(batch.unit)).ravel())
        if part.weights.any():
            yield replace(part, weights=part.weights * np.float32(len(order) / len(units)))
