"""The text of tokens: as they come, without half characters and nothing from a stop string on; and of each alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer makes of the first bytes of a character
# How byte-level tokenizers write bytes: those that can be seen as themselves, the others as what comes behind them.
SEEN = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = dict(zip(map(chr, SEEN), SEEN, strict=True))
BYTES |= {chr(256 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in SEEN)}
BEFORE = 6  # tokens before the new ones that they are decoded with: some tokenizers' text depends on those


class TextStream:
    """One sample's text, of `token_ids`. `stopped` once a stop string was found: what comes after is not taken."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.token_ids: list[int] = []
        self.stopped = False
        self._decoded = 0  # tokens whose text is in what was said or held
        self._held = ""  # may be the beginning of a stop string

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens make certain."""
        # One by one if it may stop: with which token must not depend on how many came at a time.
        said = ""
        for some in [[token] for token in token_ids] if self.stop else [token_ids]:
            if not self.stopped:
                self.token_ids += some
                said += self._say(self._decode(), last=False)
        return said

    def end(self) -> str:
        """What is left to say once there are no more tokens."""
        return "" if self.stopped else self._say(self._decode(last=True), last=True)

    def _decode(self, last: bool = False) -> str:
        start = max(0, self._decoded - BEFORE)
        before = self._text(self.token_ids[start : self._decoded])
        text = self._text(self.token_ids[start:])
        if text.endswith(UNFINISHED) and not last:
            return ""
        self._decoded = len(self.token_ids)
        return text[len(before) :]

    def _text(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def _say(self, text: str, last: bool) -> str:
        text = self._held + text
        # The one that was complete first.
        found = [(at + len(stop), at) for stop in self.stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = 0 if last else max((_overlap(text, stop) for stop in self.stop), default=0)
        said, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return said


def _overlap(text: str, stop: str) -> int:
    """How much of the end of `text` is the beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


def spelled(tokenizer: Any, token: int) -> tuple[str, bytes]:
    """One token's text and bytes.

    A part of a character has no text: it is named by its bytes as OpenAI does, such as `bytes:\\xf0\\x9f`, as all parts
    would look the same otherwise.
    """
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
