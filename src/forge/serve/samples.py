"""Samples of one prompt while they are generated: their text, and where each ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..engines.interface import part
from ..types import Completion
from .requests import GenerationJob
from .text import TextStream, Tokenizer

SLICE = 256  # tokens that are decoded in one turn of the thread that all requests share

Piece = tuple[int, Completion]  # (sample, new tokens)
TextPiece = tuple[int, str, Completion, str | None]  # (sample, text, its tokens, finish)


class Samples:
    """The samples of one prompt; `running` are those that have not ended."""

    def __init__(self, tokenizer: Tokenizer, job: GenerationJob) -> None:
        self.tokenizer = tokenizer
        self.stop = job.stop
        self.running = set(range(job.sampling.n))
        self._texts: dict[int, TextStream] = {}

    def decode(self, pieces: Sequence[Piece]) -> Iterator[TextPiece]:
        """Yield the text of new tokens. A sample ends at a stop string; its later tokens are ignored."""
        for sample, piece in pieces:
            if sample not in self.running:
                continue
            stream = self._texts.setdefault(sample, TextStream(self.tokenizer, self.stop))
            before = len(stream.token_ids)
            text = stream.add(piece.token_ids)
            piece = part(piece, 0, len(stream.token_ids) - before)  # without tokens after a stop string
            if piece.finish or stream.stopped:
                self.running.remove(sample)
                self._texts.pop(sample)
                text += stream.end()
            yield sample, text, piece, "stop" if stream.stopped else piece.finish or None


def slices(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Divide pieces so that each slice has at most SLICE tokens."""
    turn: list[Piece] = []
    space = SLICE
    for sample, piece in pieces:
        start = 0
        size = len(piece.token_ids)
        while True:
            # An empty piece, which only ends its sample, takes a turn too.
            end = min(size, start + max(1, space))
            turn.append((sample, part(piece, start, end)))
            space -= max(1, end - start)
            if space <= 0:
                yield turn
                turn = []
                space = SLICE
            if end >= size:
                break
            start = end
    if turn:
        yield turn
