"""Computation of prompts into rows of the key-value cache, whole or in pieces, without what the prefix cache has."""

from collections.abc import Iterable, Sequence

from .decoder import Decoder
from .prefixes import TOKENS, Prefix, PrefixCache
from .requests import Admission, EngineRequest, RunningSample

Item = EngineRequest | RunningSample


class Prefill:
    """Prefill of the prompts of a running batch.

    A prompt with more than `max_tokens` tokens that the prefix cache does not have is computed in pieces, one a step,
    in the prefill row of the key-value cache.

    Attributes:
        cache: the prefix cache, of at most `prefix_bytes`.
        computed, reused: numbers of prompt tokens so far that were computed, and that the prefix cache had.
        item, length: the long prompt in the prefill row, and the number of its tokens there.
    """

    def __init__(self, decoder: Decoder, max_tokens: int, prefix_bytes: int) -> None:
        self.decoder, self.max_tokens = decoder, max_tokens
        self.cache = PrefixCache(prefix_bytes)
        self.computed = self.reused = 0
        self.item: Item | None = None
        self.length = 0

    def clear(self) -> None:
        """Drop all computed prompts, as a change of weights requires."""
        self.cache.clear()
        self.item, self.length = None, 0

    def compute_piece(self, item: Item, context: list[int], blocks: list[Prefix], rows: int, max_length: int) -> int:
        """Compute the next piece of a long prompt in the prefill row; return the number of tokens of the piece.

        The last piece sets `item.prefix` and frees the prefill row.

        Args:
            context: the prompt but for its last token.
            blocks: the blocks of the prefix cache with which it starts.
            rows, max_length: as `KeyValueCache.reserve`.
        """
        cache, length = self.decoder.cache, self.length

        # The first piece starts after the blocks of the prefix cache.
        if self.item is not item:
            length = TOKENS * len(blocks)
            cache.reserve(length, rows, max_length)
            cache.fill([cache.prefill_row], blocks)
            self.reused += length

        piece = context[length : length + self.max_tokens]
        cache.reserve(length + len(piece), rows, max_length)
        self.decoder.prefill([piece], [cache.prefill_row], [length], find_images([item]))
        self.computed += len(piece)
        self.item, self.length = item, length + len(piece)
        if self.length == len(context):
            item.prefix = tuple(tensor.clone() for tensor in cache.read(cache.prefill_row, self.length))
            self.cache.add(context, item.prefix)
            self.item, self.length = None, 0

        return len(piece)

    def compute(self, admissions: Sequence[Admission], rows: int, max_length: int) -> None:
        """Compute the prompts of newly admitted samples into their rows, except tokens in the prefix cache.

        Args:
            rows, max_length: as `KeyValueCache.reserve`.
        """
        if not admissions:
            return

        cache = self.decoder.cache
        cache.reserve(max(len(admission.context) for admission in admissions), rows, max_length)
        for admission in admissions:
            cache.fill(admission.rows[:1], admission.blocks)
            self.reused += admission.start

        uncached = [admission for admission in admissions if admission.start < len(admission.context)]
        if uncached:
            pieces = [admission.context[admission.start :] for admission in uncached]
            first_rows = [admission.rows[0] for admission in uncached]
            images = find_images(admission.item for admission in uncached)
            self.decoder.prefill(pieces, first_rows, [admission.start for admission in uncached], images)
            self.computed += sum(map(len, pieces))

        # A prompt was computed in the first of its rows; the other samples of the request get a copy, in later
        # steps by `item.prefix`.
        for item, admitted_rows, context, _ in admissions:
            prefix = cache.read(admitted_rows[0], len(context))
            cache.fill(admitted_rows[1:], [prefix])
            self.cache.add(context, prefix)
            if isinstance(item, EngineRequest) and item.admitted < item.sampling.n:
                item.prefix = tuple(tensor.clone() for tensor in prefix)


def find_images(items: Iterable[Item]) -> list[tuple[bytes, ...]]:
    """Return the images of the prompt of each request or sample."""
    return [(item if isinstance(item, EngineRequest) else item.request).sampling.images for item in items]
