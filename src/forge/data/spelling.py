"""Single tokens as text."""

from __future__ import annotations

import re
from typing import Any

UNFINISHED = "\ufffd"  # decoded from the first bytes of a character
# Byte-level tokenizers write printable bytes as themselves, the others as characters from 256 on.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = dict(zip(map(chr, PRINTABLE), PRINTABLE, strict=True))
BYTES |= {chr(256 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in PRINTABLE)}


def spelled(tokenizer: Any, token: int) -> tuple[str, bytes]:
    """One token's text and bytes. Parts of a character are written as OpenAI does, such as `bytes:\\xf0\\x9f`."""
    text = tokenizer.decode([token])
    if UNFINISHED not in text:
        return text, text.encode()
    # The token is a part of a character: its bytes, as byte fallback or a byte-level tokenizer writes them.
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
