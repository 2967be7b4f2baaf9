"""Grammars that bound what is generated, by llguidance: tokens that a grammar excludes are not drawn.

The grammars made here are in Lark, which both engines take. What a grammar accepts is defined over text, so that it
holds for every tokenizer: an added token that stands for text, such as Qwen's `<tool_call>`, is text like any other.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge.models.tokenizer import has_tokenizer, open_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray

Schema = Mapping[str, Any]
MAX_CALLS = 64  # of one turn: `forge_envs.calls` reads no more
COMPILED = 64  # compiled grammars that an engine keeps: compiling takes up to a second
INSTALL = 'grammars need llguidance: pip install llguidance, or pip install "torchforge-rl[agents]"'
# Without flexible whitespace: a model could write spaces without end.
COMPACT = {"whitespace_flexible": False}
# Templates write the calls of a conversation with these separators, and models have learned them.
SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Matcher:
    """The state of one sample in its grammar: which tokens may come next."""

    def __init__(
        self, state: LLMatcher, stop_ids: frozenset[int], text: NDArray[np.uint32], stops: NDArray[np.uint32]
    ) -> None:
        self._state = state
        self._stop_ids = stop_ids
        # Two sets of tokens, a bit each: those that may be part of the text, and the request's stop tokens.
        self._text = text
        self._stops = stops

    def copy(self) -> Matcher:
        """A matcher in the same state, which advances separately."""
        return Matcher(self._state.deep_copy(), self._stop_ids, self._text, self._stops)

    def fill(self, bits: NDArray[np.int32]) -> None:
        """Write which tokens may come next: bit t % 32 of `bits[t // 32]` for token t. The request's stop tokens may
        exactly where the grammar is complete.

        Raises:
            ValueError: no token may, or a limit of llguidance.
        """
        from llguidance.numpy import fill_next_token_bitmask

        allowed = np.zeros((1, len(self._text)), dtype=np.int32)
        fill_next_token_bitmask(self._state, allowed, 0)
        self._check()
        # llguidance marks the tokenizer's end of text, which need not be a stop token of the request.
        words = allowed[0].view(np.uint32) & self._text
        if self._state.is_accepting():
            words |= self._stops
        if not words.any():
            raise ValueError("the grammar allows no token of this model here: the tokenizer lacks a character of it")
        bits[:] = words[: len(bits)].view(np.int32)

    def accept(self, token: int) -> None:
        """Advance by a drawn token; a stop token ends the text. ValueError: the grammar excludes it."""
        if token not in self._stop_ids:
            self._state.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._state.is_error():
            raise ValueError(f"the grammar cannot continue: {_line(self._state.get_error())}")


class Grammars:
    """The grammars of one model: opens its tokenizer, and compiles each text once. May be used from any thread."""

    def __init__(self, folder: Path, vocab: int) -> None:
        """Remember the model's folder and its number of tokens; the first grammar opens the tokenizer."""
        self._folder = folder
        self._vocab = vocab
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled = lru_cache(COMPILED)(self._compile)

    def matcher(self, grammar: str, stops: frozenset[int]) -> Matcher:
        """The first state of a grammar, Lark or llguidance's JSON, for a request with these stop tokens.

        Raises:
            ValueError: llguidance is not installed, the folder has no tokenizer, the grammar is invalid, or no token
                could end its text.
        """
        if not stops:
            raise ValueError("a grammar needs a token that ends its text: the model has no eos, set stop_token_ids")
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _open(self._folder, self._vocab)
            tokenizer = self._tokenizer
        # A tokenizer may have more tokens than the model, which are no logits of it.
        outside = range(self._vocab, tokenizer.vocab_size)
        text = ~_bits([*tokenizer.eos_tokens, *stops, *outside], tokenizer.vocab_size)
        return Matcher(self._compiled(grammar), stops, text, _bits(stops, tokenizer.vocab_size))

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        assert self._tokenizer is not None
        state = LLMatcher(self._tokenizer, grammar, log_level=0)
        if state.is_error():
            raise ValueError(f"the grammar is invalid: {_line(state.get_error())}")
        return state


def json_grammar(schema: Schema) -> str:
    """The grammar of a JSON Schema's values, without white space between their parts.

    Raises:
        ValueError: it is not a schema of an object, or has a keyword that llguidance cannot keep to.
    """
    return _checked(f"start: %json {_guided(schema, COMPACT)}")


def calls_grammar(syntax: str, tools: Sequence[Schema], choice: str = "required", parallel: bool = True) -> str:
    """The grammar of an answer that is a call of a tool or, with `parallel`, several, as `forge_envs.calls` reads them.

    Args:
        syntax: one of `forge_envs.calls` whose calls are JSON, "hermes" or "llama3".
        tools: schemas in OpenAI's format; a tool takes no argument that its parameters do not have, unless they have
            `additionalProperties`.
        choice: "required", or the name of the one tool that is to be called.

    Raises:
        ValueError: another syntax, no such tool, or parameters that llguidance cannot keep to.
    """
    if syntax not in ("hermes", "llama3"):
        raise ValueError(f"tool_choice required is not supported with the {syntax} syntax")
    functions = [tool["function"] for tool in tools]
    names = [function["name"] for function in functions]
    if choice != "required":
        functions = [function for function in functions if function["name"] == choice]
    if not functions:
        raise ValueError(f"tool_choice {choice} needs one of the tools, which are: {', '.join(names) or 'none'}")
    begin, end, separator, key = ("", "", "; ", "parameters")
    if syntax == "hermes":
        begin, end, separator, key = ("<tool_call>\n", "\n</tool_call>", "\n", "arguments")
    # One rule a tool, so that arguments are those of the name before them.
    rules = []
    for number, function in enumerate(functions):
        schema = function.get("parameters") or {"type": "object"}
        schema = {"properties": {}, "additionalProperties": False, **schema}
        opening = f'{begin}{{"name": {json.dumps(function["name"])}, "{key}": '
        closing = f"}}{end}"
        rules.append(f"call_{number}: {json.dumps(opening)} arguments_{number} {json.dumps(closing)}")
        rules.append(f"arguments_{number}: %json {_guided(schema, SPACED)}")
    more = f" ({json.dumps(separator)} call){{0,{MAX_CALLS - 1}}}" if parallel else ""
    alternatives = " | ".join(f"call_{number}" for number in range(len(functions)))
    return _checked("\n".join([f"start: call{more}", f"call: {alternatives}", *rules]))


def _guided(schema: Schema, options: Mapping[str, object]) -> str:
    """A schema's text with options of llguidance."""
    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON Schema must be an object, got {schema!r}"[:200])
    return json.dumps({**schema, "x-guidance": options})


def _checked(grammar: str) -> str:
    """A grammar that llguidance accepts, whatever the tokenizer."""
    _check_installed()
    from llguidance import LLMatcher

    error = LLMatcher.validate_grammar(grammar)
    if error:
        raise ValueError(f"the schema is not supported: {_line(error)}")
    return grammar


def _check_installed() -> None:
    if find_spec("llguidance") is None:
        raise ValueError(INSTALL)


def _open(folder: Path, vocab: int) -> LLTokenizer:
    """The tokenizer of a model's folder for llguidance, with at least `vocab` tokens.

    llguidance's own reading takes every added token for a special one, which text cannot have: a grammar with the text
    `<tool_call>` would then fail where that is an added token. Here only tokens that are declared special are.
    """
    _check_installed()
    from llguidance import LLTokenizer, TokenizerWrapper

    if not has_tokenizer(folder):
        raise ValueError(f"a grammar needs the tokenizer of the model, and {folder} has none")
    tokenizer = open_tokenizer(str(folder))
    size = max(vocab, len(tokenizer))
    try:
        return LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, size)), n_vocab=size)
    except (AttributeError, ValueError) as error:
        raise ValueError(f"llguidance cannot read the tokenizer of {folder}: {_line(str(error))}") from error


class _Vocabulary:
    """The bytes of each token, and how a text is usually encoded: what llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, size: int) -> None:
        from llguidance.hf import from_tokenizer
        from tokenizers import decoders

        added = tokenizer.added_tokens_decoder
        backend = tokenizer.backend_tokenizer
        self._encode: Callable[[str], list[int]]
        # One token a character, which stands for itself: llguidance does not know these.
        if isinstance(backend.decoder, decoders.Fuse):
            names = [tokenizer.convert_ids_to_tokens(number) for number in range(len(tokenizer))]
            self.tokens = [name.encode() for name in names] + [b""] * (size - len(names))
            self._encode = lambda text: list(backend.encode(text, add_special_tokens=False).ids)
        else:
            base = from_tokenizer(tokenizer, n_vocab=size)
            self.tokens = [base.decode_bytes([number]) for number in range(size)]
            self._encode = base.tokenize_str
        for number, token in added.items():
            self.tokens[number] = token.content.encode()
        special = [number for number, token in added.items() if token.special]
        self.special_token_ids = [*special, *range(len(tokenizer), size)]
        # Engines end a text by the request's stop tokens, so that any special token will do.
        eos = tokenizer.eos_token_id
        self.eos_token_id = self.special_token_ids[0] if eos is None else eos
        self._added = {token.content: None if token.special else number for number, token in added.items()}
        texts = sorted(map(re.escape, self._added), key=len, reverse=True)
        self._pattern = re.compile("|".join(texts) or "(?!)")

    def __call__(self, text: str) -> list[int]:
        """The usual tokens of a text; the name of a special token is text."""
        ids: list[int] = []
        start = 0
        for match in self._pattern.finditer(text):
            ids += self._encode(text[start : match.start()])
            number = self._added[match.group()]
            # In two parts, of which neither is the special token's name.
            if number is None:
                ids += self._encode(match.group()[:1]) + self._encode(match.group()[1:])
            else:
                ids.append(number)
            start = match.end()
        return ids + self._encode(text[start:])


def _line(message: str) -> str:
    """The first line's worth of a message, without llguidance's account of its state."""
    return " ".join(message.partition("<state>")[0].split())[:300]


def _bits(tokens: Iterable[int], vocab: int) -> NDArray[np.uint32]:
    """A set of tokens: bit t % 32 of word t // 32 for token t."""
    flags = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)
