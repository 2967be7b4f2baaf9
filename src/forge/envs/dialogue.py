"""Conversations as tokens that only grow: the policy's turns stay as they were sampled.

Decoding and encoding them again changes most turns, so that the policy would be trained on tokens it did not sample.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..data.chat import ChatFormat
from ..data.special_tokens import SpecialTokens, whole
from .calls import SYNTAXES, Schema, Syntax, read_action
from .environment import Action, Message
from .templates import TEMPLATES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "\x02answer\x03"
_ASKED: tuple[Message, ...] = ({"role": "user", "content": "ask"}, {"role": "assistant", "content": _MARK})


class Dialogue:
    """Converts messages to the tokens between two turns of the policy, and a turn of the policy to an action.

    A space breaks the text of special tokens in messages, so that only the template can end a turn.

    Args:
        tokenizer: of the policy.
        template: True is the tokenizer's own chat template; or "plain", "chatml", "llama3", the text of a jinja
            template, or a file with it.
        syntax: of tool calls, see `forge.envs.calls`; None infers it from the template.
        options: further arguments of the template.

    Raises:
        ValueError: there is no template; it does not end a turn with a special token, or rewrites earlier messages.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: bool | str = True,
        syntax: Syntax | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if syntax is not None and syntax not in SYNTAXES:
            raise ValueError(f"the syntax of tool calls must be one of {', '.join(SYNTAXES)}, not {syntax!r}")
        chosen = TEMPLATES.get(template, template) if isinstance(template, str) else template
        self._tokenizer, self._options = tokenizer, dict(options or {})
        self._chat = lru_cache(16)(
            lambda tools: ChatFormat(
                tokenizer, chosen, {**self._options, **({"tools": json.loads(tools)} if tools else {})}
            )
        )
        source = self._chat("").template
        inferred: Syntax = "llama3" if "ipython" in source or "python_tag" in source else "plain"
        self.syntax: Syntax = syntax or ("hermes" if "<tool_call>" in source else inferred)
        self._special = SpecialTokens(tokenizer)
        text = self._render(_ASKED, (), more=False)
        after = self._encode(text[text.index(_MARK) + len(_MARK) :]) if _MARK in text else []
        if not after or after[0] not in self._special.ids:
            raise ValueError(
                "the chat template does not end an assistant's turn with a special token, so generation would not stop "
                "there: take another, such as chatml, or one that writes {{ eos_token }} after it"
            )
        self._closer = after[0]
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([self._closer, *eos]))
        self._between([{"role": "user", "content": "more"}], ())

    def initial(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> list[int]:
        """The tokens before the policy's first turn. ValueError: no messages, or the template fails."""
        if not messages:
            raise ValueError("an episode begins with at least one message for the policy to answer")
        if tools:
            try:
                self._between([{"role": "tool", "name": "tool", "content": "more"}], ())
            except ValueError as error:
                raise ValueError(
                    f"the chat template does not support tool messages: use chatml or another ({error})"
                ) from None
        return self._encode(self._render(list(map(self._plain, messages)), tools))

    def extend(self, tokens: Sequence[int], messages: Sequence[Message], tools: Sequence[Schema] = ()) -> list[int]:
        """The tokens between the turn that `tokens` ends with and the next one: the end of that turn if it was
        truncated, the messages, and the next generation prompt.

        Raises:
            ValueError: no messages, or one of the assistant.
        """
        if not messages or any(message["role"] == "assistant" for message in messages):
            raise ValueError("an episode continues with at least one message, of the user or of tools")
        between = self._between(list(map(self._plain, messages)), tools)
        return between[1:] if tokens and tokens[-1] == self._closer else between

    def read(self, tokens: Sequence[int], tools: Sequence[Schema] = (), *, truncated: bool = False) -> Action:
        """The action in the tokens of one turn."""
        return read_action(self.text(tokens), self.syntax, tools, truncated=truncated)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of one turn, without the token that ends it."""
        ended = bool(tokens) and tokens[-1] in self._special.ids
        return str(self._tokenizer.decode(list(tokens[:-1] if ended else tokens), skip_special_tokens=False))

    def _render(self, messages: Sequence[Message], tools: Sequence[Schema], *, more: bool = True) -> str:
        chat = self._chat(json.dumps(list(tools)) if tools else "")
        return chat.render(messages, add_generation_prompt=more)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _plain(self, message: Message) -> Message:
        return {**message, "content": self._special.inert(whole(message["content"]))}

    def _between(self, messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        """The tokens from the end of an assistant's turn to the next one's beginning."""
        before, after = self._render(_ASKED, tools, more=False), self._render([*_ASKED, *messages], tools)
        said = before.index(_MARK) + len(_MARK)
        tokens = self._encode(after[said:])
        if not after.startswith(before[:said]) or tokens[:1] != [self._closer]:
            raise ValueError(
                "the chat template rewrites earlier turns once later ones follow, so tokens could not stay as they "
                "were sampled: set the template to chatml, llama3 or another that keeps them"
            )
        return tokens
