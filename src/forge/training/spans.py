"""Spans of text in answers, as masks of their tokens: a loss that names one sees where it is."""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from ..types import Batch


class Decoder(Protocol):
    """The part of a tokenizer that reads tokens."""

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Their text."""


def spans_in(batch: Batch, patterns: Mapping[str, str], decoder: Decoder) -> dict[str, np.ndarray]:
    """For each pattern a mask of its matches, [tokens] bool, in what the policy wrote, one turn after the other.

    A match is group 1 of the regular expression, or all of it where there is none. A token counts if any of its
    characters do.
    """
    masks = {name: np.zeros(len(batch.tokens), dtype=bool) for name in patterns}
    # Neighbouring trained tokens of one sequence are a turn: it begins after a token that is not, or with a sequence.
    sequence = np.repeat(np.arange(len(batch)), batch.lengths)
    turn_ids = np.where(batch.mask, sequence, -1)
    changes = np.flatnonzero(np.diff(turn_ids, prepend=-1, append=-1))
    bounds = zip(changes[:-1].tolist(), changes[1:].tolist(), strict=True)
    for begin, end in bounds:
        # Between turns is what the environment wrote.
        if not batch.mask[begin]:
            continue
        tokens = batch.tokens[begin:end].tolist()
        for name, pattern in patterns.items():
            for low, high in token_spans(tokens, pattern, decoder):
                masks[name][begin + low : begin + high] = True
    return masks


def token_spans(tokens: Sequence[int], pattern: str, decoder: Decoder) -> list[tuple[int, int]]:
    """The matches of a pattern in the text of tokens, as (first token, the one after the last)."""
    text = decoder.decode(tokens, skip_special_tokens=True)

    def characters(count: int) -> int:
        return len(decoder.decode(tokens[:count], skip_special_tokens=True))

    counts = range(len(tokens) + 1)
    spans = []
    for match in re.finditer(pattern, text):
        start, end = match.span(1 if match.re.groups else 0)
        if start < 0 or start == end:  # the group is not part of the match, or empty
            continue
        low = bisect.bisect_right(counts, start, key=characters) - 1
        high = bisect.bisect_left(counts, end, key=characters)
        # A character of several tokens reads as U+FFFD until its last.
        while (
            high < len(tokens) and decoder.decode(tokens[:high], skip_special_tokens=True) != text[: characters(high)]
        ):
            high += 1
        spans.append((low, high))
    return spans
