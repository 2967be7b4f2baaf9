"""Grammars of generated text, by llguidance: tokens that a grammar excludes are not sampled.

The grammars made here are in Lark, which both engines take. Added tokens of a tokenizer are no text in them: a grammar
names the ones that it has.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Container, Iterable, Mapping, Sequence
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
        """Return a matcher in the same state, which advances separately."""
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
        self._check_state()
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
            self._check_state()

    def _check_state(self) -> None:
        if self._state.is_error():
            raise ValueError(f"the grammar cannot continue: {_first_line(self._state.get_error())}")


class Grammars:
    """The grammars of one model: opens its tokenizer, and compiles each text once. May be used from any thread."""

    def __init__(self, folder: Path, vocab: int) -> None:
        """Remember the model's folder and its number of tokens; the first grammar opens the tokenizer."""
        self._folder = folder
        self._vocab = vocab
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled = lru_cache(COMPILED)(self._compile_grammar)

    def matcher(self, grammar: str, stops: frozenset[int]) -> Matcher:
        """Return the first state of a grammar, Lark or llguidance's JSON, for a request with these stop tokens.

        Raises:
            ValueError: llguidance is not installed, the folder has no tokenizer, the grammar is invalid, or no token
                could end its text.
        """
        if not stops:
            raise ValueError("a grammar needs a token that ends its text: the model has no eos, set stop_token_ids")
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _open_tokenizer(self._folder, self._vocab)
            tokenizer = self._tokenizer
        # A tokenizer may have more tokens than the model has logits.
        outside = range(self._vocab, tokenizer.vocab_size)
        text = ~_token_bits([*tokenizer.eos_tokens, *stops, *outside], tokenizer.vocab_size)
        return Matcher(self._compiled(grammar), stops, text, _token_bits(stops, tokenizer.vocab_size))

    def _compile_grammar(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        assert self._tokenizer is not None
        state = LLMatcher(self._tokenizer, grammar, log_level=0)
        if state.is_error():
            raise ValueError(f"the grammar is invalid: {_first_line(state.get_error())}")
        return state


def json_grammar(schema: Schema) -> str:
    """Return the grammar of a JSON Schema's values, without white space between their parts.

    Raises:
        ValueError: it is not a schema of an object, or has a keyword that llguidance cannot keep to.
    """
    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON Schema must be an object, got {schema!r}"[:200])
    return _check_grammar(f"start: %json {json.dumps({**schema, 'x-guidance': COMPACT})}")


def calls_grammar(
    syntax: str, tools: Sequence[Schema], choice: str = "required", parallel: bool = True, added: Container[str] = ()
) -> str:
    """Return the grammar of an answer that is a call of a tool or, with `parallel`, several, as `forge_envs.calls`
    reads them.

    Args:
        syntax: one of `forge_envs.calls` whose calls are JSON, "hermes" or "llama3".
        tools: schemas in OpenAI's format; a tool takes no argument that its parameters do not have, unless they have
            `additionalProperties`.
        choice: "required", or the name of the one tool that is to be called.
        added: the added tokens of the tokenizer, such as `<tool_call>`, as which a call's tags are then written.

    Raises:
        ValueError: another syntax, no such tool, or parameters that llguidance cannot keep to.
    """
    if syntax not in ("hermes", "llama3"):
        raise ValueError(f"tool_choice required is not supported with the {syntax} syntax")
    functions = [tool["function"] for tool in tools if choice in ("required", tool["function"]["name"])]
    if not functions:
        raise ValueError(f"tool_choice {choice} needs one of the tools")
    tags, separator, key = ("", ""), "; ", "parameters"
    if syntax == "hermes":
        open_tag, close_tag = (mark if mark in added else json.dumps(mark) for mark in ("<tool_call>", "</tool_call>"))
        tags, separator, key = (f'{open_tag} "\\n"', f'"\\n" {close_tag}'), "\n", "arguments"

    # One rule a tool, so that arguments fit the name before them.
    rules = []
    for number, function in enumerate(functions):
        schema = {"properties": {}, "additionalProperties": False, **(function.get("parameters") or {"type": "object"})}
        opening = json.dumps(f'{{"name": {json.dumps(function["name"])}, "{key}": ')
        rules.append(f'call_{number}: {tags[0]} {opening} arguments_{number} "}}" {tags[1]}')
        rules.append(f"arguments_{number}: %json {json.dumps({**schema, 'x-guidance': SPACED})}")

    more = f" ({json.dumps(separator)} call){{0,{MAX_CALLS - 1}}}" if parallel else ""
    alternatives = " | ".join(f"call_{number}" for number in range(len(functions)))
    return _check_grammar("\n".join([f"start: call{more}", f"call: {alternatives}", *rules]))


def _check_grammar(grammar: str) -> str:
    """Return a grammar that llguidance accepts, whatever the tokenizer."""
    _check_installed()
    from llguidance import LLMatcher

    error = LLMatcher.validate_grammar(grammar)
    if error:
        raise ValueError(f"the schema is not supported: {_first_line(error)}")
    return grammar


def _check_installed() -> None:
    if find_spec("llguidance") is None:
        raise ValueError(INSTALL)


def _open_tokenizer(folder: Path, vocab: int) -> LLTokenizer:
    """Return the tokenizer of a model's folder for llguidance, with at least `vocab` tokens."""
    _check_installed()
    from llguidance import LLTokenizer, TokenizerWrapper
    from llguidance.hf import from_tokenizer
    from tokenizers import decoders

    if not has_tokenizer(folder):
        raise ValueError(f"a grammar needs the tokenizer of the model, and {folder} has none")
    tokenizer: Any = open_tokenizer(str(folder))
    size = max(vocab, len(tokenizer))

    try:
        if isinstance(tokenizer.backend_tokenizer.decoder, decoders.Fuse):
            return LLTokenizer(TokenizerWrapper(_Characters(tokenizer, size)), n_vocab=size)
        return from_tokenizer(tokenizer, n_vocab=size)
    except (AttributeError, ValueError) as error:
        raise ValueError(f"llguidance cannot read the tokenizer of {folder}: {_first_line(str(error))}") from error


class _Characters:
    """A tokenizer with a token for each character, which llguidance does not know: the bytes of its tokens."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, size: int) -> None:
        names = [tokenizer.convert_ids_to_tokens(number) for number in range(len(tokenizer))]
        self.tokens = [name.encode() for name in names] + [b""] * (size - len(names))
        special = [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]
        self.special_token_ids = [*special, *range(len(names), size)]
        # Engines end a text by the request's stop tokens, so that any special token will do.
        self.eos_token_id = special[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Return the usual tokens of a text."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _first_line(message: str) -> str:
    """Return the first line's worth of a message, without llguidance's account of its state."""
    return " ".join(message.partition("<state>")[0].split())[:300]


def _token_bits(tokens: Iterable[int], vocab: int) -> NDArray[np.uint32]:
    """Return a set of tokens: bit t % 32 of word t // 32 for token t."""
    flags = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)
