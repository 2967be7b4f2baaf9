"""From a conversation to tokens and a mask of what the assistant wrote, through the tokenizer's chat template.

The whole conversation is rendered and tokenised once; the mask is laid over it by character positions. Nothing is ever
tokenised in pieces, so the tokens are those that the template gives anywhere else.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .files import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Span = tuple[int, int]
TrainOn = Literal["assistant", "last"]

MESSAGE_FIELDS = ("messages", "conversations")
ROLES = ("system", "developer", "user", "assistant", "tool")
_ALIASES = {"human": "user", "gpt": "assistant"}
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def messages(row: Row, field: str) -> list[Message]:
    """The conversation in a field of a row, as {role, content} or {from, value}; other keys of a message stay.

    ValueError: no such field, no list of messages, an unknown role, content that is no text.
    """
    if field not in row:
        raise ValueError(f"no field {field!r}: it has {', '.join(row)}")
    if not isinstance(row[field], list) or not row[field]:
        raise ValueError(f"field {field!r} must be a list of messages, got {str(row[field])[:60]!r}")
    return [_message(entry, f"{field}, message {number}") for number, entry in enumerate(row[field], 1)]


def _message(entry: Any, where: str) -> Message:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} must be a message {{role, content}}, not {type(entry).__name__}")
    # Columnar files give every message the keys of all others, as None.
    found = {name: value for name, value in entry.items() if value is not None}
    if "from" in found and "role" not in found:
        role = found.pop("from")
        found = {"role": _ALIASES.get(role, role), "content": found.pop("value", None), **found}
    if found.get("role") not in ROLES:
        raise ValueError(f"{where} has the role {found.get('role')!r}: use {', '.join(ROLES)}")
    if found.get("content") is None and found.get("tool_calls"):
        found["content"] = ""
    if not isinstance(found.get("content"), str):
        raise ValueError(f"{where} must have text as its content, not {type(found.get('content')).__name__}")
    return found


class ChatFormat:
    """Renders and encodes conversations.

    Args:
        tokenizer: for `encode`, one that knows the characters of its tokens (a fast one).
        template: True is the tokenizer's chat template; else the text of a jinja template, or a file that holds it.
        options: further arguments of the template, such as enable_thinking.

    Raises:
        ValueError, FileNotFoundError: there is no template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: bool | str = True,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.options = tokenizer, dict(options or {})
        if isinstance(template, str):
            self.template = _template(template)
        elif not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template: use a chat model's, or set chat_template to a jinja template"
            )
        else:
            self.template = tokenizer.get_chat_template(tools=self.options.get("tools"))
        self._special = set(tokenizer.all_special_ids)
        self._checked: set[tuple] = set()

    def render(self, conversation: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The text of a conversation. ValueError: the template raises an error."""
        options = {**self.options, "tokenize": False, "add_generation_prompt": add_generation_prompt}
        return self._safely(
            lambda: str(self.tokenizer.apply_chat_template(list(conversation), chat_template=self.template, **options))
        )

    def encode(
        self, conversation: Sequence[Message], *, train_on: TrainOn = "assistant", since: int = 0
    ) -> tuple[list[int], list[bool]]:
        """Token ids of the whole conversation, and a mask: True on what the assistant wrote in its turns.

        That is what follows the prompt for a generation, to the token that ends the turn. Where the template marks it
        with `{% generation %}`, it is what it marks. A token of which one character belongs to it belongs to it: if it
        did not, nothing would ever teach that character.

        Args:
            train_on: all turns of the assistant, or only its last.
            since: only turns from this message on.

        Raises:
            ValueError: no such turn, or the template makes it impossible to say what was written in it.
        """
        turns = [i for i, message in enumerate(conversation) if i >= since and message["role"] == "assistant"]
        if not turns:
            raise ValueError("no assistant turn to learn from: " + ", ".join(m["role"] for m in conversation))
        turns = turns[-1:] if train_on == "last" else turns
        text = self.render(conversation)
        encoding = self._backend.encode(text, add_special_tokens=False)
        tokens, reach = encoding.ids, encoding.offsets
        if _MARK.search(self.template):
            start = len(self._context(conversation, turns[0], text)) if turns[0] else 0
            spans = [(max(start, begin), end) for begin, end in self._marked(conversation) if end > start]
        else:
            closers = {end for token, (_, end) in zip(tokens, reach, strict=True) if token in self._special}
            spans = [self._answer(conversation, turn, text, closers) for turn in turns]
        return tokens, [any(begin < last and end > first for first, last in spans) for begin, end in reach]

    def check(self, conversation: Sequence[Message], *, train_on: TrainOn = "assistant", since: int = 0) -> None:
        """`encode`, once for every kind of conversation. ValueError as there."""
        # What a template makes of a turn depends on the roles before and after it, and on thoughts that it removes.
        kind = (train_on, since, *((m["role"], "</think>" in m["content"]) for m in conversation))
        if kind not in self._checked:
            self.encode(conversation, train_on=train_on, since=since)
            self._checked.add(kind)

    @cached_property
    def _backend(self) -> Any:
        """The tokenizer, telling all characters of a token: some leave the spaces out."""
        from tokenizers import processors

        if not self.tokenizer.is_fast:
            raise ValueError("conversations need a fast tokenizer, which knows the characters of its tokens")
        backend = copy.deepcopy(self.tokenizer.backend_tokenizer)  # type: ignore[attr-defined]
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
        backend.no_truncation()
        backend.no_padding()
        return backend

    def _context(self, conversation: Sequence[Message], turn: int, text: str) -> str:
        """What the policy is given before it writes this turn."""
        context = self.render(conversation[:turn], add_generation_prompt=True)
        if not text.startswith(context):
            remedy = _HELP if turn + 1 < len(conversation) else _ALONE
            raise ValueError(f"message {turn + 1}: the chat template renders what precedes it in another way {remedy}")
        return context

    def _answer(self, conversation: Sequence[Message], turn: int, text: str, closers: set[int]) -> Span:
        if turn == 0:
            raise ValueError("message 1 is an assistant's, with nothing to answer: leave it out, or set train_on: last")
        context = self._context(conversation, turn, text)
        upto = text if turn == len(conversation) - 1 else self.render(conversation[: turn + 1])
        if not text.startswith(upto) or not upto.startswith(context):
            raise ValueError(f"message {turn + 1}: the chat template renders it in another way {_HELP}")
        answer = upto[len(context) :]
        if answer == conversation[turn]["content"]:
            raise ValueError(
                f"message {turn + 1}: the chat template writes nothing after an assistant's turn, so nothing would "
                "teach the policy to end it: use a template that closes it, as with {{ eos_token }}"
            )
        # Generation stops at a special token; the line break that many templates add after it is not generated.
        closed = len(context) + len(answer.rstrip())
        return len(context), closed if closed in closers else len(upto)

    def _marked(self, conversation: Sequence[Message]) -> list[Span]:
        """The characters that the template marks.

        Not through return_assistant_tokens_mask, which loses a turn, and all after it, if a tokenizer that trims its
        offsets begins the turn with a space.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {**self.tokenizer.special_tokens_map, **self.options, "add_generation_prompt": False}
        _, spans = self._safely(
            lambda: render_jinja_template(
                [list(conversation)], chat_template=self.template, return_assistant_tokens_mask=True, **options
            )
        )
        return [(begin, end) for begin, end in spans[0] if end > begin]

    def _safely(self, call: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return call()
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template fails: {' '.join(str(error).split())}") from error


_ALONE = "before an answer than with it: set chat_template to one whose generation prompt is how its answers begin"
_HELP = (
    "once later ones follow, so what the assistant wrote cannot be told apart: set train_on: last, "
    "or chat_template to one that leaves earlier messages as they are"
)


def _template(setting: str) -> str:
    if "{" in setting:
        return setting
    place = Path(setting).expanduser()
    if not place.is_file():
        raise FileNotFoundError(f"chat_template {setting!r} is neither a jinja template nor a file (in {Path.cwd()})")
    return place.read_text(encoding="utf-8")
