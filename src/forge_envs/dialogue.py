"""Conversion of conversations to token sequences that only grow: the policy's turns stay as they were sampled.

If turns were decoded and encoded again, most would change, and the policy would be trained on tokens that it did not
sample. This module's chat templates are for tokenizers that have none, or one that rewrites earlier messages.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from forge.data.chat import ChatFormat, Thoughts
from forge.data.special_tokens import SpecialTokens
from forge.data.turns import Rewritten

from .calls import Schema, Syntax, check_syntax, read_action, syntax_of
from .environment import Action, Message


class Dialogue:
    """Converter of messages to the tokens between two turns of the policy, and of a turn of the policy to an action.

    In messages, the text of a special token is broken by a space, so that only the template can end a turn.

    Args:
        tokenizer: the policy's tokenizer.
        template: the chat template: True for the tokenizer's own; "plain", "chatml" or "llama3" for one of this module;
            or the text of a jinja template, or a file with it.
        syntax: how the policy writes tool calls, see `forge_envs.calls`; None: it is inferred from the template.
        options: additional arguments of the template.
        thoughts: what becomes of the thoughts of earlier turns, which many templates omit once a question follows.
            "keep": turns stay in the context as they were sampled. "template": the context is the conversation as the
            template renders it; where that changes an earlier turn, `rewrites` is true, and a new branch starts.

    Attributes:
        tokenizer, thoughts: the arguments.
        exported_template: the template for the tokenizer of a model that is trained on these episodes; None for the
            tokenizer's own.
        syntax: the argument, or what was inferred.
        stop_ids: the tokens at which generation stops: those that end a turn in this template, and eos.

    Raises:
        ValueError: the tokenizer has no template, or the template does not end a turn with a special token or rewrites
            earlier messages.
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
            # A model whose tokenizer starts every text with bos has never been trained on texts without it. Rendered
            # templates are encoded without it, so that the template must contain it.
            template, bos = TEMPLATES[template], tokenizer.bos_token_id
            if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] and "bos_token" not in template:
                template = "{{ bos_token }}" + template
        self.tokenizer = tokenizer
        plain = ChatFormat(tokenizer, template, options, key="episode.template")
        self.exported_template = plain.exported

        # By the tools of an episode, as JSON, since they are a part of what the template renders.
        self._chat = lru_cache(16)(lambda tools: plain.with_options({"tools": json.loads(tools)} if tools else {}))
        self.thoughts: Thoughts = thoughts
        self.syntax: Syntax = syntax or syntax_of(self._chat("").template)
        self._special = SpecialTokens(tokenizer)

        # Generation stops at the token that ends a turn, which must therefore be special.
        turns = self._chat("").turns
        if not turns.closer or not turns.plain_tail.startswith(turns.closer):
            raise ValueError(
                "the chat template does not end an assistant's turn with a special token, so generation would not "
                "stop there: use another template, such as chatml, or one that writes {{ eos_token }} after it"
            )

        self.stop_ids: tuple[int, ...] = self._chat("").stop_ids
        # The tokens with which a turn ends in a rendered conversation: the last one's, one's with calls, and one's that
        # is followed by another message. An eos that is none of these does not end a turn for the template.
        closers = [turns.closer, turns.closer_of_calls]
        self._closers = {int(tokenizer.convert_tokens_to_ids(end)) for end in closers if end}  # type: ignore[arg-type]
        if self.thoughts == "keep":
            self._closers.add(self._tokens_between([{"role": "user", "content": "more"}], ())[0])

    @property
    def writes_calls(self) -> bool:
        """Return whether the template renders the tool calls of messages; otherwise they must be part of the text."""
        return self._chat("").writer.form() is not None

    def initial(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> list[int]:
        """Return the tokens before the policy's first turn: the rendered messages and the generation prompt.

        Raises:
            ValueError: there are no messages, or the template cannot render them or the results of the tools.
        """
        if not messages:
            raise ValueError("an episode must start with at least one message that the policy can answer")
        # A template that cannot render the results of tools must fail now, not in the middle of an episode.
        if tools:
            try:
                self._tokens_between([{"role": "tool", "name": "tool", "content": "more"}], ())
            except ValueError as error:
                raise ValueError(
                    f"the chat template does not support tool messages: use chatml or another ({error})"
                ) from None
        return self._encode_text(self._render(list(map(self._plain_message, messages)), tools))

    def extend(self, tokens: Sequence[int], messages: Sequence[Message], tools: Sequence[Schema] = ()) -> list[int]:
        """Return the tokens between a turn of the policy and its next turn: the messages and the generation prompt.

        Before them is the token that ends the turn, if the turn was truncated and does not have it.

        Args:
            tokens: the episode's tokens, which end with the policy's turn.

        Raises:
            ValueError: there are no messages, or one of them is the assistant's.
        """
        if not messages or any(message["role"] == "assistant" for message in messages):
            raise ValueError("an episode must continue with at least one message of role user or tool")
        between = self._tokens_between(list(map(self._plain_message, messages)), tools)
        # Where the start of the next message ends a turn, another one than the policy wrote stays.
        is_ended = bool(tokens) and tokens[-1] in self._closers
        has_other = any(self._chat("").turns.borrowed.values()) and tokens[-1:] != between[:1]
        return between[1:] if is_ended and not has_other else between

    def rewrites(self, tokens: Sequence[int], messages: Sequence[Message], tools: Sequence[Schema] = ()) -> bool:
        """Return whether the template renders a conversation differently from its read and sampled tokens.

        False if `thoughts` is "keep".

        Args:
            tokens: the episode's tokens.
            messages: the whole conversation, in which the policy's turns are messages of `turn_message`.
        """
        if self.thoughts == "keep":
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
        """Parse the tokens of one turn of the policy into an action.

        Args:
            truncated: whether the turn was cut at its limit of tokens.
        """
        return read_action(self.text(tokens, truncated=truncated), self.syntax, tools, truncated=truncated)

    def text(self, tokens: Sequence[int], *, truncated: bool = False) -> str:
        """Return the text of one turn without the special token that ends it; a `truncated` turn has none."""
        has_end = bool(tokens) and tokens[-1] in self._special.ids and not truncated
        return str(self.tokenizer.decode(list(tokens[:-1] if has_end else tokens), skip_special_tokens=False))

    def _render(self, messages: Sequence[Message], tools: Sequence[Schema]) -> str:
        return self._chat(json.dumps(list(tools)) if tools else "").render(messages, add_generation_prompt=True)

    def _encode_text(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _plain_message(self, message: Message) -> Message:
        return dict(self._special.inert_values(message))

    def _tokens_between(self, messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        """Return the tokens from the one that ends a turn of the assistant up to its next turn."""
        try:
            return self._encode_text(self._chat(json.dumps(list(tools)) if tools else "").turns.following(messages))
        except Rewritten as error:
            raise ValueError(
                "the chat template rewrites earlier turns once later turns follow, so sampled tokens would change: "
                f"set the template to chatml, llama3 or another that keeps them, or thoughts to template ({error})"
            ) from None


_TOOLS = (
    "# Tools\n\nYou may call one or more of these functions, each given by its JSON schema:\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
)

# For base models: one message a line, without roles. An answer ends with eos.
PLAIN = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% else %}{{ '\n' }}{% endif %}{% endfor %}"
)

# ChatML as Qwen and Hermes models use it: tool calls and results are between tags, and results are a user's message.
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

# Llama 3: every message has a header with its role, which is "ipython" for the results of tools.
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
