"""Detokenization of a stream, without partial characters and up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ..data.spelling import UNFINISHED

Tokenizer = Any  # of transformers, which types the values of its methods as unions
MAX_INCOMPLETE = 32  # tokens without a complete character, after which they are final; a character has at most 4 bytes
CONTEXT = 6  # preceding tokens to decode with new ones: the text of some tokenizers depends on them


class TextStream:
    """The text of one sample's `token_ids`; `stopped` once a stop string is complete: later tokens are ignored."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = [StopString(text) for text in stop]
        self.token_ids: list[int] = []
        self.stopped = False
        self._decoded = 0  # tokens whose text was returned or withheld
        self._withheld = ""  # possible beginning of a stop string

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that becomes final with these tokens."""
        # With stop strings one by one: the token that completes one must not depend on how many arrive at once.
        text = ""
        for batch in [[token] for token in token_ids] if self.stop else [token_ids]:
            if not self.stopped:
                self.token_ids += batch
                text += self._advance(last=False)
        return text

    def end(self) -> str:
        """Return the remaining text, after the last token."""
        return "" if self.stopped else self._advance(last=True)

    def _advance(self, last: bool) -> str:
        start = max(0, self._decoded - CONTEXT)
        before = self.tokenizer.decode(self.token_ids[start : self._decoded], skip_special_tokens=True)
        text = self.tokenizer.decode(self.token_ids[start:], skip_special_tokens=True)
        ready = len(self.token_ids)
        # The last tokens may be a part of a character: their text is not final.
        if text.endswith(UNFINISHED) and not last:
            ready = self._count_final(start, text)
            text = self.tokenizer.decode(self.token_ids[start:ready], skip_special_tokens=True)
        added = text[len(before) :] if ready != self._decoded else ""
        self._decoded = ready
        text = self._withheld + added
        for end, letter in enumerate(added, len(self._withheld) + 1):
            # Of several stop strings the one that was complete first.
            length = max((stop.add(letter) for stop in self.stop), default=0)
            if length:
                self.stopped = True
                self._withheld = ""
                return text[: end - length]
        withheld = 0 if last else max((stop.matched for stop in self.stop), default=0)
        self._withheld = text[len(text) - withheld :]
        return text[: len(text) - withheld]

    def _count_final(self, start: int, text: str) -> int:
        """Count the tokens with final text, if `text` of those from `start` ends within a character. Of many that never
        complete one, all but the last are final: decoding them again with each token would take quadratic time."""
        if len(self.token_ids) - self._decoded > MAX_INCOMPLETE:
            middle = len(self.token_ids) - MAX_INCOMPLETE // 2
            for end in range(middle, middle - 4, -1):
                if text.startswith(self.tokenizer.decode(self.token_ids[start:end], skip_special_tokens=True)):
                    return end
        return self._decoded


class StopString:
    """One stop string; `matched` is the length of its longest beginning that the text ends with. Each character is read
    once, however long the string is (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0

    def add(self, letter: str) -> int:
        """Return the length of the string if this letter completes it, else 0."""
        self.matched = _extend(self.text, _borders(self.text), self.matched, letter)
        return self.matched if self.matched == len(self.text) else 0


def _extend(text: str, borders: Sequence[int], matched: int, letter: str) -> int:
    """Return the length of the longest beginning of `text` that ends with its first `matched` letters and this one."""
    while matched and text[matched] != letter:
        matched = borders[matched - 1]
    return matched + (text[matched] == letter)


@lru_cache(256)
def _borders(text: str) -> list[int]:
    """Return for each beginning of a text the length of the longest shorter beginning that it ends with."""
    lengths = [0]
    for letter in text[1:]:
        lengths.append(_extend(text, lengths, lengths[-1], letter))
    return lengths
