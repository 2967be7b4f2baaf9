"""A conversation as tokens that only ever grow: what the policy wrote stays as it was sampled, never encoded again.

Decoding and encoding again changes most sampled turns, so a policy would be trained on tokens that it did not write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..data.chat import ChatFormat
from .calls import SYNTAXES, Schema, Syntax, read_action
from .environment import Action, Message
from .templates import TEMPLATES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "\x02answer\x03"
_ASKED: tuple[Message, ...] = ({"role": "user", "content": "ask"}, {"role": "assistant", "content": _MARK})


class Dialogue:
    """Turns messages into the tokens between two turns of the policy, and a turn of the policy into an action.

    The text of a special token in a message is broken by a space: nobody but the template ends a turn.

    Args:
        tokenizer: of the policy.
        template: True is the tokenizer's own chat template; or "plain", "chatml", "llama3", the text of a jinja
            template, or a file that holds it.
        syntax: how the policy writes tool calls, see `forge.envs.calls`; None finds out from the template.
        options: further arguments of the template.

    Raises:
        ValueError: there is no template; it does not end a turn with one special token, or writes earlier messages in
            another way once later ones follow.
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
        self.syntax: Syntax = syntax or _syntax(self._chat("").template)
        # Some tokenizers have special tokens that they do not name among those.
        added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special_ids = {*tokenizer.all_special_ids, *added}
        special = (text for text in {*tokenizer.all_special_tokens, *added.values()} if len(text) > 1)
        self._special = re.compile("|".join(sorted(map(re.escape, special), key=len, reverse=True)) or r"(?!)")
        self._closer = self._find_closer()
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([self._closer, *eos]))
        self._between([{"role": "user", "content": "more"}], ())

    def initial(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> list[int]:
        """The tokens before the policy's first turn. ValueError: no messages, or the template refuses them."""
        if not messages:
            raise ValueError("an episode begins with at least one message: what is the policy to answer?")
        if tools:
            self._check_tools()
        return self._encode(self._render(list(map(self._plain, messages)), tools))

    def extend(self, tokens: Sequence[int], messages: Sequence[Message], tools: Sequence[Schema] = ()) -> list[int]:
        """The tokens between the turn that `tokens` ends with and the next: the end of that turn, where it was cut off,
        the messages, and the beginning of the next.

        ValueError: no messages, or one of the assistant: what it says is sampled, not given.
        """
        if not messages or any(message["role"] == "assistant" for message in messages):
            raise ValueError("an episode goes on with messages of the user or of tools, and at least one")
        between = self._between(list(map(self._plain, messages)), tools)
        return between[1:] if tokens and tokens[-1] == self._closer else between

    def read(self, tokens: Sequence[int], tools: Sequence[Schema] = (), *, truncated: bool = False) -> Action:
        """What the policy said in the tokens of one turn."""
        return read_action(self.text(tokens), self.syntax, tools, truncated=truncated)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of one turn, without what ends it."""
        ended = bool(tokens) and tokens[-1] in self._special_ids
        return str(self._tokenizer.decode(list(tokens[:-1] if ended else tokens), skip_special_tokens=False))

    def _render(self, messages: Sequence[Message], tools: Sequence[Schema], *, more: bool = True) -> str:
        chat = self._chat(json.dumps(list(tools)) if tools else "")
        return chat.render(messages, add_generation_prompt=more)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _plain(self, message: Message) -> Message:
        # Half a character, as JSON can write it, has no tokens.
        whole = message["content"].encode("utf-8", "replace").decode()
        content = self._special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", whole)
        return {**message, "content": content}

    def _find_closer(self) -> int:
        text = self._render(_ASKED, (), more=False)
        after = self._encode(text[text.index(_MARK) + len(_MARK) :]) if _MARK in text else []
        if not after or after[0] not in self._special_ids:
            raise ValueError(
                "the chat template does not end an assistant's turn with a special token, so generation would not stop "
                "there: take another, such as chatml, or one that writes {{ eos_token }} after it"
            )
        return after[0]

    def _check_tools(self) -> None:
        try:
            self._between([{"role": "tool", "name": "tool", "content": "more"}], ())
        except ValueError as error:
            raise ValueError(
                f"the chat template cannot say what tools answer: take chatml or another ({error})"
            ) from None

    def _between(self, messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        before, after = self._render(_ASKED, tools, more=False), self._render([*_ASKED, *messages], tools)
        said = before.index(_MARK) + len(_MARK)
        tokens = self._encode(after[said:])
        if not after.startswith(before[:said]) or tokens[:1] != [self._closer]:
            raise ValueError(
                "the chat template writes earlier turns in another way once later ones follow, so tokens could not "
                "stay as they were sampled: set the template to chatml, llama3 or another that leaves them alone"
            )
        return tokens


def _syntax(template: str) -> Syntax:
    if "<tool_call>" in template:
        return "hermes"
    return "llama3" if "ipython" in template or "python_tag" in template else "plain"
