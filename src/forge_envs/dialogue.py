"""Conversations as tokens that only grow: the policy's turns stay as they were sampled.

Decoding and encoding them again changes most turns, so that the policy would be trained on tokens it did not sample.
The chat templates here are for tokenizers without one, or whose own rewrites earlier messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from forge.data.chat import ChatFormat, Thoughts
from forge.data.special_tokens import SpecialTokens
from forge.data.turns import Rewritten

from .calls import Schema, Syntax, check_syntax, read_action, syntax_of
from .environment import Action, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Dialogue:
    """Converts messages to the tokens between two turns of the policy, and a turn of the policy to an action.

    A space breaks the text of special tokens in messages, so that only the template can end a turn.

    Args:
        tokenizer: of the policy.
        template: True is the tokenizer's own chat template; or "plain", "chatml", "llama3", the text of a jinja
            template, or a file with it.
        syntax: of tool calls, see `forge_envs.calls`; None infers it from the template.
        options: additional arguments of the template.
        thoughts: of earlier turns, which many templates omit once a question follows. "keep": turns stay in the
            context as they were sampled; "template": the context is the conversation as the template renders it, and
            where that changes an earlier turn, `rewrites` is true and a new branch starts.

    Attributes:
        tokenizer, thoughts: as they were given.
        stop_ids: tokens at which generation stops: those that end a turn in this template, and eos.

    Raises:
        ValueError: there is no template; it does not end a turn with a special token, or rewrites earlier messages.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: bool | str = True,
        syntax: Syntax | None = None,
        options: Mapping[str, Any] | None = None,
        thoughts: Thoughts = "keep",
    ) -> None:
        if syntax is not None:
            check_syntax(syntax)
        if isinstance(template, str) and template in TEMPLATES:
            template = built_in(template, tokenizer)
        self.tokenizer = tokenizer
        self._options = dict(options or {})
        self._chat = lru_cache(16)(
            lambda tools: ChatFormat(
                tokenizer, template, {**self._options, **({"tools": json.loads(tools)} if tools else {})}
            )
        )
        self.thoughts: Thoughts = thoughts

        self._rewriting = thoughts == "template"
        self.syntax: Syntax = syntax or syntax_of(self._chat("").template)
        self._special = SpecialTokens(tokenizer)

        # Generation stops at the token that ends a turn, which must therefore be special.
        turns = self._chat("").turns
        if not turns.closer or not turns.plain_tail.startswith(turns.closer):
            raise ValueError(
                "the chat template does not end an assistant's turn with a special token, so generation would not stop "
                "there: take another, such as chatml, or one that writes {{ eos_token }} after it"
            )

        self.stop_ids: tuple[int, ...] = self._chat("").stop_ids
        # A turn may end otherwise once others follow. An eos that is none of these does not end it for the template.
        ends = [turns.closer, turns.closer_of_calls]
        self._closers = {int(tokenizer.convert_tokens_to_ids(end)) for end in ends if end}  # type: ignore[arg-type]
        if not self._rewriting:
            self._closers.add(self._tokens_between([{"role": "user", "content": "more"}], ())[0])

    @property
    def writes_calls(self) -> bool:
        """Return whether the template has a place for the tool calls of messages; otherwise they are a part of the
        text."""
        return self._chat("").writer.form() is not None

    def initial(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> list[int]:
        """Return the tokens before the policy's first turn. ValueError: no messages, or the template fails."""
        if not messages:
            raise ValueError("an episode starts with at least one message for the policy to answer")
        # A template without a place for the results of tools fails here, not in the middle of an episode.
        if tools:
            try:
                self._tokens_between([{"role": "tool", "name": "tool", "content": "more"}], ())
            except ValueError as error:
                raise ValueError(
                    f"the chat template does not support tool messages: use chatml or another ({error})"
                ) from None
        return self._encode_text(self._render(list(map(self._plain_message, messages)), tools))

    def extend(self, tokens: Sequence[int], messages: Sequence[Message], tools: Sequence[Schema] = ()) -> list[int]:
        """Return the tokens between the turn that `tokens` ends with and the next one: the end of that turn if it was
        truncated, the messages, and the next generation prompt.

        Raises:
            ValueError: no messages, or one of the assistant.
        """
        if not messages or any(message["role"] == "assistant" for message in messages):
            raise ValueError("an episode continues with at least one message, of the user or of tools")
        # The policy has written the token that ends its turn, unless the turn was truncated.
        between = self._tokens_between(list(map(self._plain_message, messages)), tools)
        return between[1:] if tokens and tokens[-1] in self._closers else between

    def rewrites(self, tokens: Sequence[int], messages: Sequence[Message], tools: Sequence[Schema] = ()) -> bool:
        """Return whether the template renders a conversation differently from the tokens that the policy read and
        sampled. Always false where thoughts are kept.

        Args:
            messages: the whole conversation, with the policy's turns as of `turn_message`.
        """
        if not self._rewriting:
            return False
        text = self._render(list(map(self._plain_message, messages)), tools)
        return not text.startswith(str(self.tokenizer.decode(list(tokens), skip_special_tokens=False)))

    def turn_message(self, action: Action) -> Message:
        """Return a turn of the policy as a message, its tool calls in OpenAI's format."""
        if not action.calls or action.errors or not self.writes_calls:
            return {"role": "assistant", "content": action.content if self.syntax == "harmony" else action.text}
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in action.calls
        ]
        return {"role": "assistant", "content": action.content, "tool_calls": calls}

    def read(self, tokens: Sequence[int], tools: Sequence[Schema] = (), *, truncated: bool = False) -> Action:
        """Return the action in the tokens of one turn."""
        return read_action(self.text(tokens, truncated=truncated), self.syntax, tools, truncated=truncated)

    def text(self, tokens: Sequence[int], *, truncated: bool = False) -> str:
        """Return the text of one turn, without the token that ends it; nothing ended a turn that was `truncated`."""
        ended = bool(tokens) and tokens[-1] in self._special.ids and not truncated
        return str(self.tokenizer.decode(list(tokens[:-1] if ended else tokens), skip_special_tokens=False))

    def _render(self, messages: Sequence[Message], tools: Sequence[Schema]) -> str:
        chat = self._chat(json.dumps(list(tools)) if tools else "")
        return chat.render(messages, add_generation_prompt=True)

    def _encode_text(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _plain_message(self, message: Message) -> Message:
        return dict(self._special.inert_values(message))

    def _tokens_between(self, messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        """Return the tokens from the end of an assistant's turn to the next one's beginning."""
        try:
            return self._encode_text(self._chat(json.dumps(list(tools)) if tools else "").turns.following(messages))
        except Rewritten as error:
            raise ValueError(
                "the chat template rewrites earlier turns once later ones follow, so tokens could not stay as they "
                "were sampled: set the template to chatml, llama3 or another that keeps them, or thoughts to template "
                f"({error})"
            ) from None


_TOOLS = (
    "# Tools\n\nYou may call one or more of these functions, each given by its JSON schema:\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
)

# Messages line by line, without roles: for base models. An answer ends with eos.
PLAIN = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% else %}{{ '\n' }}{% endif %}{% endfor %}"
)

# ChatML as Qwen and Hermes models read it, tool calls and results between tags. A tool's result is a user turn.
CHATML = (
    "{% set system = messages[0].role == 'system' %}"
    "{% if tools or system %}<|im_start|>system\n"
    "{% if system %}{{ messages[0].content }}{% endif %}"
    "{% if tools %}{% if system %}{{ '\n\n' }}{% endif %}" + _TOOLS + "\n"
    "For each call write a JSON object with its name and arguments between tags:\n"
    '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>{% endif %}<|im_end|>\n{% endif %}'
    "{% for message in messages %}{% if not (loop.first and system) %}"
    "{% if message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Llama 3: a header for every message, results of tools under the role that the models know.
LLAMA3 = (
    "{{ bos_token }}"
    "{% set system = messages[0].role == 'system' %}"
    "{% if tools or system %}<|start_header_id|>system<|end_header_id|>\n\n"
    "{% if system %}{{ messages[0].content }}{% endif %}"
    "{% if tools %}{% if system %}{{ '\n\n' }}{% endif %}" + _TOOLS + "\n"
    'To call a function answer with nothing but {"name": <name>, "parameters": <arguments>}.{% endif %}'
    "<|eot_id|>{% endif %}"
    "{% for message in messages %}{% if not (loop.first and system) %}"
    "<|start_header_id|>{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>\n\n"
    "{{ message.content }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

TEMPLATES = {"plain": PLAIN, "chatml": CHATML, "llama3": LLAMA3}


def built_in(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the template of this name, beginning with the token that the tokenizer puts before every text: a base
    model has read none without it."""
    # Encoding adds bos to a text, but not to a rendered template.
    template = TEMPLATES[name]
    first = tokenizer("a")["input_ids"][:1]
    begins = tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
    return "{{ bos_token }}" + template if begins and "bos_token" not in template else template
