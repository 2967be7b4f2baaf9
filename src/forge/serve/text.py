"""Detokenization of a stream, without partial characters and up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ..data.spelling import UNFINISHED

WAITING = 32  # tokens without a complete character, after which they are taken as they are; a character has 4 bytes
BEFORE = 6  # preceding tokens to decode with new ones: the text of some tokenizers depends on them


class TextStream:
    """The text of one sample's `token_ids`; `stopped` once a stop string was found: later tokens are ignored."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, [StopString(one) for one in stop]
        self.token_ids: list[int] = []
        self.stopped = False
        self._decoded = 0  # number of tokens whose text was returned or held back
        self._held = ""  # possible beginning of a stop string

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that becomes final with these tokens."""
        # With stop strings one by one: the token that completes one must not depend on how many came at once.
        text = ""
        for some in [[token] for token in token_ids] if self.stop else [token_ids]:
            if not self.stopped:
                self.token_ids += some
                text += self._advance(last=False)
        return text

    def end(self) -> str:
        """The remaining text, once there are no more tokens."""
        return "" if self.stopped else self._advance(last=True)

    def _advance(self, last: bool) -> str:
        start = max(0, self._decoded - BEFORE)
        before = self.tokenizer.decode(self.token_ids[start : self._decoded], skip_special_tokens=True)
        text = self.tokenizer.decode(self.token_ids[start:], skip_special_tokens=True)
        ready = len(self.token_ids)
        if text.endswith(UNFINISHED) and not last:
            ready = self._finished(start, text)
            text = self.tokenizer.decode(self.token_ids[start:ready], skip_special_tokens=True)
        added = text[len(before) :] if ready != self._decoded else ""
        self._decoded = ready
        text = self._held + added
        for end, letter in enumerate(added, len(self._held) + 1):
            # Of several stop strings the one that was complete first.
            if complete := max((stop.add(letter) for stop in self.stop), default=0):
                self.stopped, self._held = True, ""
                return text[: end - complete]
        keep = 0 if last else max((stop.size for stop in self.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _finished(self, start: int, text: str) -> int:
        """How many tokens have their final text, where `text` of those from `start` ends within a character. Of many
        that never complete one, all but the last: decoding them again with each token would take quadratic time."""
        if len(self.token_ids) - self._decoded > WAITING:
            for end in range(len(self.token_ids) - WAITING // 2, len(self.token_ids) - WAITING // 2 - 4, -1):
                if text.startswith(self.tokenizer.decode(self.token_ids[start:end], skip_special_tokens=True)):
                    return end
        return self._decoded


class StopString:
    """One stop string and `size`, the length of its longest beginning that the text ends with. Each character is read
    once, however long the string is (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text, self.size = text, 0

    def add(self, letter: str) -> int:
        """The length of the string if this letter completes it, else 0."""
        self.size = longer(self.text, shorter(self.text), self.size, letter)
        return self.size if self.size == len(self.text) else 0


def longer(text: str, shorter: Sequence[int], size: int, letter: str) -> int:
    """The length of the longest beginning of `text` with which its first `size` letters, not all, and this one end."""
    while size and text[size] != letter:
        size = shorter[size - 1]
    return size + (text[size] == letter)


@lru_cache(256)
def shorter(text: str) -> list[int]:
    """For each beginning of a text, the length of the next shorter one with which it ends."""
    lengths = [0]
    for letter in text[1:]:
        lengths.append(longer(text, lengths, lengths[-1], letter))
    return lengths
