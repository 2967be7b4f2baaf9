"""The samples of one prompt while they are drawn: their text, and where each ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..engines.interface import part
from ..types import Completion
from .requests import Job
from .text import TextStream

SLICE = 256  # tokens whose text is made in one turn of the thread that all requests share

Piece = tuple[int, Completion]  # (sample, new tokens)
Said = tuple[int, str, Completion, str | None]  # (sample, text, its tokens, finish)


class Samples:
    """Those of a prompt that have not ended are `left`."""

    def __init__(self, tokenizer: Any, job: Job) -> None:
        self.tokenizer, self.stop = tokenizer, job.stop
        self.left = set(range(job.sampling.n))
        self._texts: dict[int, TextStream] = {}

    def take(self, pieces: Sequence[Piece]) -> Iterator[Said]:
        """What the next tokens say. A sample ends at a stop string; its later tokens are ignored."""
        for sample, piece in pieces:
            if sample not in self.left:
                continue
            stream = self._texts.setdefault(sample, TextStream(self.tokenizer, self.stop))
            before = len(stream.token_ids)
            text = stream.add(piece.token_ids)
            piece = part(piece, 0, len(stream.token_ids) - before)  # without tokens after a stop string
            if piece.finish or stream.stopped:
                self.left.remove(sample)
                self._texts.pop(sample)
                text += stream.end()
            yield sample, text, piece, "stop" if stream.stopped else piece.finish or None


def slices(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """The same pieces, at most SLICE tokens at a time."""
    turn, room = list[Piece](), SLICE
    for sample, piece in pieces:
        start, size = 0, len(piece.token_ids)
        while True:
            end = min(size, start + max(1, room))
            turn.append((sample, part(piece, start, end)))
            room -= max(1, end - start)
            if room <= 0:
                yield turn
                turn, room = [], SLICE
            if end >= size:
                break
            start = end
    if turn:
        yield turn
