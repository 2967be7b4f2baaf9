"""Detokenization of a stream, without partial characters and up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..data.spelling import UNFINISHED

WAITING = 32  # tokens without a complete character, after which they are taken as they are; a character has 4 bytes
BEFORE = 6  # preceding tokens to decode with new ones: the text of some tokenizers depends on them


class TextStream:
    """The text of one sample's `token_ids`; `stopped` once a stop string was found: later tokens are ignored."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, stop
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
        if ready == self._decoded:
            text = self._held
        else:
            text = self._held + text[len(before) :]
            self._decoded = ready
        # Of several stop strings the one that was complete first.
        found = [(at + len(stop), at) for stop in self.stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = 0  # characters at the end that may begin a stop string
        for stop in () if last else self.stop:
            sizes = range(min(len(text), len(stop) - 1), keep, -1)
            keep = next((size for size in sizes if text.endswith(stop[:size])), keep)
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
