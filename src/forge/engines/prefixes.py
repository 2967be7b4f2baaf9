"""Keys and values of prompts that were computed before, shared by all prompts that start with the same tokens."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

# Tokens of a block, as many as vLLM's default: smaller blocks find more of a prompt, with more of them to look up.
TOKENS = 16
# A prompt waits a step for another that is being computed if they share that many tokens more than the cache has: fewer
# are computed faster than a step takes.
MIN_SHARED_TOKENS = 64

Prefix = tuple[Tensor, ...]  # keys, values, (layers, K, tokens, D) each, and choices of experts; see `Cache.read`
Key = tuple[int, tuple[int, ...]]  # the block before this one, 0 for none, and its own tokens


class Block(NamedTuple):
    """The cached keys and values of `TOKENS` tokens; `number` identifies the block, from 1."""

    number: int
    values: Prefix


class PrefixCache:
    """Keys and values of blocks of `TOKENS` prompt tokens, as a tree: prompts that start alike share their blocks.

    It has at most `limit` bytes; beyond them the least recently used blocks are dropped. Only the results of a prefill
    may be added, and none of decode steps: kernels for one token round differently, and the result of a request would
    depend on what ran before it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self._blocks: OrderedDict[Key, Block] = OrderedDict()  # a block is always newer than those that continue it
        self._number = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, tokens: Sequence[int]) -> list[Prefix]:
        """Return the keys and values of the longest chain of cached blocks with which `tokens` start, block by block.

        Their tokens are the first `TOKENS * len(result)`.
        """
        keys = list[Key]()
        chain = list[Prefix]()
        parent = 0
        for block_tokens in _split_blocks(tokens):
            if (block := self._blocks.get((parent, block_tokens))) is None:
                break
            keys.append((parent, block_tokens))
            chain.append(block.values)
            parent = block.number  # the next block is looked up as a child of this one
        self._touch_blocks(keys)
        return chain

    def add(self, tokens: Sequence[int], prompt_values: Prefix) -> None:
        """Cache copies of all full blocks of `tokens` that are not cached yet.

        Args:
            prompt_values: the keys and values of all `tokens`; see `Prefix`.
        """
        block_bytes = sum(tensor[:, :, :TOKENS].nbytes for tensor in prompt_values) if self.limit else 0
        if not block_bytes or block_bytes > self.limit:
            return

        used_keys = list[Key]()
        parent_number = 0

        for i, block_tokens in enumerate(_split_blocks(tokens)):
            if (block := self._blocks.get((parent_number, block_tokens))) is None:
                # If all blocks of a prompt do not fit, only the first are kept: later ones would drop them again.
                if (len(used_keys) + 1) * block_bytes > self.limit:
                    break
                self._number += 1
                span = slice(i * TOKENS, (i + 1) * TOKENS)
                block = Block(self._number, tuple(tensor[:, :, span].clone() for tensor in prompt_values))
                self._blocks[parent_number, block_tokens] = block
                self.size += block_bytes

            used_keys.append((parent_number, block_tokens))
            parent_number = block.number

        self._touch_blocks(used_keys)
        while self.size > self.limit:
            _, dropped = self._blocks.popitem(last=False)
            self.size -= sum(tensor.nbytes for tensor in dropped.values)

    def _touch_blocks(self, keys: list[Key]) -> None:
        """Mark a chain of blocks as just used, the first block as newest, so that a block is dropped before the blocks
        that precede it."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def clear(self) -> None:
        """Drop all blocks, as a change of weights requires."""
        self._blocks.clear()
        self.size = 0


def _split_blocks(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the tokens of each full block, in order, without the incomplete last one."""
    return [tuple(tokens[start : start + TOKENS]) for start in range(0, len(tokens) - TOKENS + 1, TOKENS)]
