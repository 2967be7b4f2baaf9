"""Keys and values of prompts that were computed before, shared by all prompts that begin with the same tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

TOKENS = 16  # of a block

Prefix = tuple[Tensor, ...]  # keys, values, (layers, K, tokens, D) each, and choices of experts; see `Cache.read`
Key = tuple[int, tuple[int, ...]]  # the block before this one, 0 for none, and its own tokens


class Block(NamedTuple):
    """A block of cached keys and values, by its number."""

    number: int
    values: Prefix


class PrefixCache:
    """Blocks of `TOKENS` prompt tokens in a tree, least recently used ones dropped beyond `limit` bytes.

    Only what a prefill computed is kept, not what decode steps did: kernels of one token round differently, and the
    result of a request would depend on what ran before it.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self._blocks: OrderedDict[Key, Block] = OrderedDict()  # a block is always newer than those that continue it
        self._number = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, tokens: Sequence[int]) -> list[Prefix]:
        """The longest chain of known blocks that `tokens` begin with."""
        keys, found, before = list[Key](), list[Prefix](), 0
        for key in _keys(tokens):
            block = self._blocks.get((before, key))
            if block is None:
                break
            keys.append((before, key))
            found.append(block.values)
            before = block.number
        for used in reversed(keys):
            self._blocks.move_to_end(used)
        return found

    def add(self, tokens: Sequence[int], values: Prefix) -> None:
        """Copy all whole blocks of `tokens` that are not known, from keys and values of all tokens."""
        each = sum(part[:, :, :TOKENS].nbytes for part in values)
        if not each or each > self.limit:
            return
        keys, before = list[Key](), 0
        for i, key in enumerate(_keys(tokens)):
            block = self._blocks.get((before, key))
            if block is None:
                if (len(keys) + 1) * each > self.limit:
                    break
                self._number += 1
                own = slice(i * TOKENS, (i + 1) * TOKENS)
                block = self._blocks[before, key] = Block(self._number, tuple(p[:, :, own].clone() for p in values))
                self.size += each
            keys.append((before, key))
            before = block.number
        for used in reversed(keys):
            self._blocks.move_to_end(used)
        while self.size > self.limit:
            _, dropped = self._blocks.popitem(last=False)
            self.size -= sum(part.nbytes for part in dropped.values)

    def clear(self) -> None:
        """Drop everything: the weights change."""
        self._blocks.clear()
        self.size = 0


def _keys(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[at : at + TOKENS]) for at in range(0, len(tokens) - TOKENS + 1, TOKENS)]
