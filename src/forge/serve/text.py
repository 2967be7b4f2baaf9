"""Detokenization: of a stream, without partial characters and up to a stop string, and of single tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # decoded from the first bytes of a character
# Byte-level tokenizers write printable bytes as themselves, the others as characters from 256 on.
SEEN = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = dict(zip(map(chr, SEEN), SEEN, strict=True))
BYTES |= {chr(256 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in SEEN)}
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


def spelled(tokenizer: Any, token: int) -> tuple[str, bytes]:
    """One token's text and bytes. Parts of a character are written as OpenAI does, such as `bytes:\\xf0\\x9f`."""
    text = tokenizer.decode([token])
    if UNFINISHED not in text:
        return text, text.encode()
    piece = tokenizer.convert_ids_to_tokens(token)
    if re.fullmatch("<0x[0-9A-F]{2}>", piece):
        raw = bytes.fromhex(piece[3:5])
    elif all(letter in BYTES for letter in piece):
        raw = bytes(BYTES[letter] for letter in piece)
    else:
        return text, text.encode()
    try:
        return raw.decode(), raw
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw
