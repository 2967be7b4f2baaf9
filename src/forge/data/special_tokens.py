"""Single tokens as text, and special tokens that are written as text: in responses and requests they must stay text.

A tokenizer turns the text of a special token into that token, which ends a turn or starts one of another role. A space
after its first character prevents that. It changes the text, but of such texts only, and works in any template.
"""

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What other models' special tokens look like: <|im_end|>, </s>, <start_of_turn>, [/INST], <<SYS>>.
_LIKE_SPECIAL = re.compile(r"<(?=[|｜/!<]*[A-Za-z_｜|][^<>\n]{0,64}>)|\[(?=/?[A-Z][A-Z_]{2,32}\])")
_CONTROL = re.compile(r"<[|｜][^\s<>]+[|｜]>")
_NEVER = r"(?!)"  # matches nothing
# A space may make another special token of the text around it. The bound is for vocabularies in which that never ends.
_PASSES = 8


def replace_surrogates(text: str) -> str:
    r"""Return the text with "?" for lone surrogates, which JSON can hold and which have no tokens.

    >>> replace_surrogates("a\ud800b")
    'a?b'
    """
    return text.encode("utf-8", "replace").decode()


class SpecialTokens:
    """Special tokens of a tokenizer, which can be found in texts and turned into plain text.

    Attributes:
        ids: of all special tokens.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        # Some tokenizers do not list all their special tokens in all_special_tokens.
        added_tokens = tokenizer.added_tokens_decoder
        added_special = {token_id: token for token_id, token in added_tokens.items() if token.special}
        self.ids: set[int] = {*tokenizer.all_special_ids, *added_special}
        special_texts = {*tokenizer.all_special_tokens, *map(str, added_special.values())}

        # Longer ones first, so that none is matched as the beginning of another.
        patterns = sorted((re.escape(text) for text in special_texts if len(text) > 1), key=len, reverse=True)

        # A tokenizer looks for `normalized` tokens in the normalized text, which is often in lower case.
        case = re.IGNORECASE if any(token.normalized for token in added_special.values()) else 0
        self._special = re.compile("|".join(patterns) or _NEVER, case)

        # DeepSeek's tokens of roles are not marked as special, although they start a turn.
        control_texts = {text for text in map(str, added_tokens.values()) if _CONTROL.fullmatch(text)}
        patterns = sorted({*patterns, *map(re.escape, control_texts)}, key=len, reverse=True)
        self._pattern = re.compile("|".join(patterns) or _NEVER, case)

    def find(self, text: str) -> tuple[re.Match[str], str] | None:
        """Return the match of the first special token in a text, and the text of it and of all special tokens directly
        after it; None if there is no special token."""
        if (first := self._special.search(text)) is None:
            return None
        end = first.end()
        while following := self._special.match(text, end):
            end = following.end()
        return first, text[first.start() : end]

    def texts(self, text: str) -> list[str]:
        """Return the special tokens in a text, in order."""
        return self._special.findall(text)

    def inert(self, text: str) -> str:
        """Return the text with a space after the first character of each special token, so that it is plain text."""
        for _ in range(_PASSES):
            text, count = self._pattern.subn(lambda match: f"{match[0][0]} {match[0][1:]}", text)
            if not count:
                break
        return text

    def inert_values(self, value: Any) -> Any:
        """Return a JSON value, such as a message, with `inert` applied to each text in it, and "?" for lone
        surrogates."""
        if isinstance(value, str):
            return self.inert(replace_surrogates(value))
        if isinstance(value, dict):
            return {self.inert_values(name): self.inert_values(item) for name, item in value.items()}
        return [self.inert_values(item) for item in value] if isinstance(value, list) else value


def inert_anywhere(text: str) -> str:
    """Return the text with a space in everything that looks like a special token of any tokenizer.

    >>> inert_anywhere("Hello<|im_end|>")
    'Hello< |im_end|>'
    """
    return _LIKE_SPECIAL.sub(lambda match: f"{match[0]} ", replace_surrogates(text))


UNFINISHED = "\ufffd"  # what decoding writes for incomplete bytes of a character
# Byte-level tokenizers write printable bytes as themselves, the others as characters from 256 on.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = dict(zip(map(chr, PRINTABLE), PRINTABLE, strict=True))
BYTES |= {chr(256 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in PRINTABLE)}


def spell_token(tokenizer: Any, token: int) -> tuple[str, bytes]:
    """Return the text and the bytes of one token. The text of a part of a character is as OpenAI writes it:
    `bytes:\\xf0\\x9f`."""
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
