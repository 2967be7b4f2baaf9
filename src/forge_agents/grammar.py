"""Grammars for generated text, by llguidance: tokens that a grammar excludes are not sampled.

The grammars that this module writes are in Lark, which both engines accept. A tokenizer's added tokens are not text in
them: a grammar refers to such a token by its name.
"""

import json
import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
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
COMPILED = 64  # compiled grammars that an engine keeps, since compiling one takes up to a second
INSTALL = 'grammars need llguidance: pip install llguidance, or pip install "torchforge-rl[agents]"'
# Chat templates render tool calls with these separators, so that models have learned to write them.
SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(eq=False)
class Matcher:
    """The state of one sample in its grammar, which determines the tokens that may come next.

    Args:
        state: llguidance's state.
        stop_ids: the request's stop tokens.
        text: the tokens that may be part of the text, one bit for each token.
        stops: `stop_ids` as bits.
    """

    state: "LLMatcher"
    stop_ids: frozenset[int]
    text: "NDArray[np.uint32]"
    stops: "NDArray[np.uint32]"

    def copy(self) -> "Matcher":
        """Return a matcher in the same state, which advances independently."""
        return replace(self, state=self.state.deep_copy())

    def fill(self, bits: "NDArray[np.int32]") -> None:
        """Write the allowed next tokens into `bits`: bit t % 32 of `bits[t // 32]` is 1 if token t is allowed.

        The request's stop tokens may come exactly where the text so far is complete by the grammar.

        Raises:
            ValueError: no token may come next, or the state exceeds a limit of llguidance.
        """
        from llguidance.numpy import fill_next_token_bitmask

        allowed = np.zeros((1, len(self.text)), dtype=np.int32)
        fill_next_token_bitmask(self.state, allowed, 0)
        self._check_state()
        # Where the text is complete, llguidance allows the tokenizer's end-of-text token; the request may have others.
        allowed_words = allowed[0].view(np.uint32) & self.text
        if self.state.is_accepting():
            allowed_words |= self.stops
        if not allowed_words.any():
            raise ValueError(
                "the grammar allows no token of this model at this position: the tokenizer lacks a character that it "
                "needs"
            )
        bits[:] = allowed_words[: len(bits)].view(np.int32)

    def accept(self, token: int) -> None:
        """Advance the state by a sampled token; a stop token does not change it.

        Raises:
            ValueError: the grammar excludes the token.
        """
        if token not in self.stop_ids:
            self.state.consume_token(token)
            self._check_state()

    def _check_state(self) -> None:
        if self.state.is_error():
            raise ValueError(f"the grammar cannot continue: {_first_line(self.state.get_error())}")


class Grammars:
    """Compiler of grammars for one model, with a cache of compiled grammars; usable from several threads.

    Args:
        folder: the model's folder, whose tokenizer is opened for the first grammar.
        vocab: the number of tokens for which the model has logits.
    """

    def __init__(self, folder: Path, vocab: int) -> None:
        self._folder = folder
        self._vocab = vocab
        self._lock = threading.Lock()
        self._compiled = lru_cache(COMPILED)(self._compile_grammar)

    def matcher(self, grammar: str, stops: frozenset[int]) -> "Matcher":
        """Return a matcher in the initial state of a grammar.

        Args:
            grammar: its text, in Lark or llguidance's JSON.
            stops: the request's stop tokens.

        Raises:
            ValueError: llguidance is not installed, the folder has no tokenizer, the grammar is invalid, or `stops` is
                empty, so that no token could end the text.
        """
        if not stops:
            raise ValueError(
                "a grammar needs a token that ends the text, but the model has no eos token: set stop_token_ids"
            )
        with self._lock:
            tokenizer = self._tokenizer
        # A tokenizer may have more tokens than the model has logits: the model cannot sample those.
        without_logits = range(self._vocab, tokenizer.vocab_size)
        text = ~_token_bits([*tokenizer.eos_tokens, *stops, *without_logits], tokenizer.vocab_size)
        return Matcher(self._compiled(grammar), stops, text, _token_bits(stops, tokenizer.vocab_size))

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        return _open_tokenizer(self._folder, self._vocab)

    def _compile_grammar(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher

        state = LLMatcher(self._tokenizer, grammar, log_level=0)
        if state.is_error():
            raise ValueError(f"the grammar is invalid: {_first_line(state.get_error())}")
        return state


def json_grammar(schema: Schema) -> str:
    """Return the grammar of the JSON texts that satisfy a JSON schema, without white space between their parts.

    Raises:
        ValueError: the schema is not a JSON object, or has a keyword that llguidance does not support.
    """
    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON Schema must be an object, got {schema!r}"[:200])
    # With flexible white space, a model could write spaces without end.
    return _check_grammar(f"start: %json {json.dumps({**schema, 'x-guidance': {'whitespace_flexible': False}})}")


def calls_grammar(
    syntax: str, tools: Sequence[Schema], choice: str = "required", parallel: bool = True, added: Container[str] = ()
) -> str:
    """Return the grammar of an answer that consists of tool calls only, as `forge_envs.calls` parses them.

    Args:
        syntax: how calls are written, "hermes" or "llama3".
        tools: schemas in OpenAI's format. Arguments that a tool's parameters do not name are excluded, unless they have
            `additionalProperties`.
        choice: "required" for a call of any tool, or the name of the one tool to call.
        parallel: whether the answer may have several calls.
        added: the texts of the tokenizer's added tokens. Where a tag such as `<tool_call>` is one of them, the grammar
            has the token instead of its text.

    Raises:
        ValueError: the syntax is another one, no tool has the name, or llguidance does not support its parameters.
    """
    if syntax not in ("hermes", "llama3"):
        raise ValueError(f"tool_choice required is not supported with the tool call syntax {syntax} of this model")
    functions = [tool["function"] for tool in tools if choice in ("required", tool["function"]["name"])]
    if not functions:
        raise ValueError(f"tool_choice {choice} must name one of the tools")
    tags, separator, key = ("", ""), "; ", "parameters"
    if syntax == "hermes":
        # In Lark, an added token is written without quotes, and text within.
        open_tag, close_tag = (tag if tag in added else json.dumps(tag) for tag in ("<tool_call>", "</tool_call>"))
        tags, separator, key = (f'{open_tag} "\\n"', f'"\\n" {close_tag}'), "\n", "arguments"

    # Separate rules for each tool, so that the arguments are those of the tool that is named before them.
    rules = []
    for number, function in enumerate(functions):
        schema = {"properties": {}, "additionalProperties": False, **(function.get("parameters") or {"type": "object"})}
        opening = json.dumps(f'{{"name": {json.dumps(function["name"])}, "{key}": ')
        rules += [
            f'call_{number}: {tags[0]} {opening} arguments_{number} "}}" {tags[1]}',
            f"arguments_{number}: %json {json.dumps({**schema, 'x-guidance': SPACED})}",
        ]

    more = f" ({json.dumps(separator)} call){{0,{MAX_CALLS - 1}}}" if parallel else ""
    alternatives = " | ".join(f"call_{number}" for number in range(len(functions)))
    return _check_grammar("\n".join([f"start: call{more}", f"call: {alternatives}", *rules]))


def _check_grammar(grammar: str) -> str:
    """Return a grammar unchanged; ValueError if llguidance is not installed or cannot compile it."""
    _check_installed()
    from llguidance import LLMatcher

    if error := LLMatcher.validate_grammar(grammar):
        raise ValueError(f"the schema is not supported: {_first_line(error)}")
    return grammar


def _check_installed() -> None:
    if find_spec("llguidance") is None:
        raise ValueError(INSTALL)


def _open_tokenizer(folder: Path, vocab: int) -> "LLTokenizer":
    """Return the tokenizer of a model's folder as llguidance's, filled up to at least `vocab` tokens.

    Raises:
        ValueError: llguidance is not installed, or the folder has no tokenizer that it can read.
    """
    _check_installed()
    from llguidance import LLTokenizer, TokenizerWrapper
    from llguidance.hf import from_tokenizer
    from tokenizers import decoders

    if not has_tokenizer(folder):
        raise ValueError(f"a grammar needs the model's tokenizer, but {folder} has none")
    tokenizer: Any = open_tokenizer(str(folder))
    size = max(vocab, len(tokenizer))

    try:
        # Of the tokenizers here, only those with a token for each character have this decoder.
        if isinstance(tokenizer.backend_tokenizer.decoder, decoders.Fuse):
            return LLTokenizer(TokenizerWrapper(_Characters(tokenizer, size)), n_vocab=size)
        return from_tokenizer(tokenizer, n_vocab=size)
    except (AttributeError, ValueError) as error:
        raise ValueError(f"llguidance cannot read the tokenizer of {folder}: {_first_line(str(error))}") from error


class _Characters:
    """Adapter to llguidance's interface for tokenizers with one token for each character.

    Args:
        size: the number of tokens; those that the tokenizer does not have are empty.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Any, size: int) -> None:
        names = [tokenizer.convert_ids_to_tokens(number) for number in range(len(tokenizer))]
        self.tokens = [name.encode() for name in names] + [b""] * (size - len(names))
        special = [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]
        self.special_token_ids = [*special, *range(len(names), size)]
        # llguidance needs some token for the end of a text. Engines end texts by the request's stop tokens instead.
        self.eos_token_id = special[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _first_line(message: str) -> str:
    """Return an error message of llguidance as one line of at most 300 characters, without its dump of the state."""
    return " ".join(message.partition("<state>")[0].split())[:300]


def _token_bits(tokens: Iterable[int], vocab: int) -> "NDArray[np.uint32]":
    """Return a set of tokens as bits: bit t % 32 of word t // 32 is 1 for each token t."""
    word_count = -(-vocab // 32)  # rounded up
    flags = np.zeros(word_count * 32, dtype=np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)
