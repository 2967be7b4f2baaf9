"""Rows to prompts: fields, template, chat format, tokens; and the dataset of prompts."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from string import Formatter
from typing import TYPE_CHECKING, Any

from ..types import Prompt, Sample
from .chat import ChatFormat, Message
from .config import DatasetConfig, RowsConfig
from .files import Row, Rows, check_values
from .stream import RowStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION_FIELDS = ("question", "prompt", "problem", "input")
LETTERS = string.ascii_uppercase
PROMPT_FIELDS = (
    *("prompt_template", "target_field", "prompt_field", "target_pattern"),
    *("chat_template", "system_prompt", "chat_options", "choices_field"),
)


@dataclass(slots=True)
class PromptFormat:
    """Renders rows as prompts and targets; see the fields of `forge.data.config.DatasetConfig`.

    Raises:
        ValueError: invalid settings.
    """

    tokenizer: Any  # None where only the settings are checked
    prompt_template: str
    target_field: str | None = None
    prompt_field: str | None = None
    target_pattern: str | None = None
    chat_template: bool | str = False
    system_prompt: str | None = None
    chat_options: Mapping[str, Any] | None = None
    choices_field: str | list[str] | None = None
    chat: ChatFormat | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.chat_template:
            self.chat = ChatFormat(self.tokenizer, self.chat_template, self.chat_options)
        elif self.system_prompt or self.chat_options:
            raise ValueError("system_prompt and chat_options need chat_template: true")
        if self.target_pattern is not None:
            if self.target_field is None:
                raise ValueError("target_pattern needs a target_field")
            try:
                groups = re.compile(self.target_pattern).groups
            except re.error as error:
                raise ValueError(
                    f"target_pattern {self.target_pattern!r} is not a regular expression: {error}"
                ) from error
            if groups < 1:
                raise ValueError(f"target_pattern {self.target_pattern!r} needs a group (...) around the target")
        if (self.choices_field is not None) != ("choices" in self._names()):
            raise ValueError("choices_field and {choices} in the prompt_template need each other")

    def _names(self) -> set[str]:
        try:
            names = {name for _, name, _, _ in Formatter().parse(self.prompt_template) if name is not None}
        except ValueError as error:
            raise ValueError(
                f"prompt_template {self.prompt_template!r}: {error} (write {{{{ and }}}} for braces)"
            ) from error
        if not all(re.fullmatch(r"[^\d\W]\w*", name) for name in names):
            raise ValueError(
                f"prompt_template {self.prompt_template!r}: braces hold one field name; write {{{{ and }}}} for braces"
            )
        return names

    def fields(self, row: Iterable[str]) -> dict[str, str]:
        """The row's field for every name in the template. ValueError: one is missing; lists the existing ones."""
        has = list(row)
        question = self.prompt_field or next((name for name in QUESTION_FIELDS if name in has), "question")
        template_fields = {name: question if name == "question" else name for name in self._names() - {"choices"}}
        options = [self.choices_field] if isinstance(self.choices_field, str) else self.choices_field or []
        needed = [self.prompt_field, *template_fields.values(), *options, self.target_field]
        for name in needed:
            if name is not None and name not in has:
                hint = "; set target_field to null for prompts without a target" if name == self.target_field else ""
                raise ValueError(f"no field {name!r}: it has {', '.join(has)}{hint}")
        return template_fields

    def render(self, row: Row) -> tuple[str, str]:
        """The user's text and the target of a row. ValueError: a missing or empty field, or no match."""
        # The question from its template, with lettered options if there are any.
        values = {name: plain(row, column) for name, column in self.fields(row).items()}
        options = self._options(row)
        values["choices"] = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))
        text = self.prompt_template.format(**values)
        if not text.strip():
            raise ValueError("the prompt is empty")
        if self.target_field is None:
            return text, ""
        # The target, or the part that the pattern selects; of options the letter.
        target = plain(row, self.target_field)
        if self.target_pattern is not None:
            match = re.search(self.target_pattern, target)
            if match is None or match[1] is None:
                raise ValueError(f"target_pattern {self.target_pattern!r} finds nothing in {target[-60:]!r}")
            target = match[1].strip()
        if not target.strip():
            raise ValueError(f"field {self.target_field!r}, the target, is empty")
        return text, self._letter(row[self.target_field], target, options) if options else target

    def _options(self, row: Row) -> list[str]:
        """The options of multiple choice in the order of their letters; empty without `choices_field`. ValueError: two
        are equal, or one is empty."""
        # One letter must be right: equal or empty options would make it two.
        options = self._listed(row)
        if len(set(options)) < len(options) or not all(options):
            raise ValueError(
                f"two options are equal, or one is empty, so that no letter is right alone: {options!r:.80}"
            )
        return options

    def _listed(self, row: Row) -> list[str]:
        if self.choices_field is None:
            return []
        if isinstance(self.choices_field, str):
            options = row[self.choices_field]
            if not isinstance(options, list) or not 2 <= len(options) <= len(LETTERS):
                raise ValueError(f"field {self.choices_field!r} must be a list of 2 to 26 options, not {options!r:.60}")
            numbered = {f"{self.choices_field}[{number}]": option for number, option in enumerate(options)}
            return [plain(numbered, name).strip() for name in numbered]
        options = [plain(row, name).strip() for name in self.choices_field]
        # By the row itself: the same in every epoch and process, and not always the first is right.
        random.Random(repr(sorted(options))).shuffle(options)
        return options

    def _letter(self, value: object, target: str, options: list[str]) -> str:
        """The letter of the option that a target names: by its position from 0 if the row's value is a whole number, by
        its letter or text otherwise."""
        target = target.strip()
        if isinstance(self.choices_field, str):
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(options):
                return LETTERS[value]
            if target in LETTERS[: len(options)]:
                return target
            if target.isdecimal() and int(target) < len(options) and target not in options:
                return LETTERS[int(target)]
        if target not in options:
            raise ValueError(f"the target {target!r:.60} is none of the {len(options)} options")
        return LETTERS[options.index(target)]

    def encode(self, text: str) -> tuple[str, tuple[int, ...]]:
        """The policy's prompt as text and token ids."""
        if self.chat is not None:
            text = self.chat.render(self.conversation(text), add_generation_prompt=True)
            return text, tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        # Without a chat template: a text, begun as the tokenizer begins texts.
        ids = tuple(with_one_bos(self.tokenizer(text)["input_ids"], self.tokenizer))
        # Some tokenizers end every text with eos, which a prompt must not have.
        return text, ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids

    def answered(self, text: str, answer: str) -> tuple[list[int], list[bool]]:
        """Token ids of the prompt of `encode` with an answer, and a mask: True on the answer and the tokens that end
        it, which are eos, or with a chat template those that end a turn. ValueError: there are none."""
        if self.chat is not None:
            return self.chat.encode(self.conversation(text, answer))
        return supervised(Sample(Prompt(*self.encode(text)), answer), self.tokenizer)

    def conversation(self, text: str, answer: str | None = None) -> list[Message]:
        """The messages of the system prompt, the user's text and the answer, where there is one."""
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        answers = [{"role": "assistant", "content": answer}] if answer is not None else []
        return [*system, {"role": "user", "content": text}, *answers]


class PromptDataset(RowStream[Sample, DatasetConfig]):
    """An iterator of `Sample(prompt, target)`; its settings are the fields of `forge.data.config.DatasetConfig`."""

    SECTION, NOUN, LIMIT = DatasetConfig, "prompt", "max_prompt_tokens"

    def __init__(self, path: str | Rows | None = None, **settings: Any) -> None:
        super().__init__(path, **settings)
        self._format = PromptFormat(self.tokenizer, **{name: self.settings[name] for name in PROMPT_FIELDS})
        self.check()

    def targets(self) -> Iterator[str]:
        """The targets of `rows`, without bad rows of a stream."""
        for row in self.rows():
            with suppress(ValueError):
                yield self._format.render(row)[1]

    def make(self, number: int, row: Row, index: int) -> Sample | None:
        """Prompt and target of a row; None if the prompt is too long."""
        text, target = self._format.render(row)
        text, ids = self._format.encode(text)
        return Sample(Prompt(text, ids, index), target) if self.fits(len(ids)) else None


def stop_ids(settings: RowsConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end answers to prompts of these settings: those that end a turn in their chat templates. Empty
    without one, where eos alone ends an answer."""
    ids: dict[int, None] = {}
    # Each source may have another template, with other tokens at the end of a turn.
    for source in settings.sources or [{}]:
        template = source.get("chat_template", settings.chat_template)
        if template:
            options = source.get("chat_options", settings.chat_options)
            with suppress(ValueError):  # it renders prompts only
                ids |= dict.fromkeys(ChatFormat(tokenizer, template, options).stop_ids)
    return tuple(ids)


def with_one_bos(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of a text that may begin with the text of the token that the tokenizer puts before it as well."""
    return ids[1:] if ids[:2] == [tokenizer.bos_token_id] * 2 else ids


def supervised(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """Token ids of prompt, target and eos, and a mask: True on the target and eos. For prompts without a chat template,
    see `PromptFormat.answered`. ValueError: the tokenizer has no eos token."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos token to end an answer with")
    prompt = list(sample.prompt.token_ids)
    answer = [*tokenizer(sample.target, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


def plain(row: Row, name: str) -> str:
    """A field of a row as text. ValueError: it is missing, or neither text nor a number."""
    if name not in row:
        raise ValueError(f"no field {name!r}: it has {', '.join(row)}")
    value = row[name]
    if not isinstance(value, str | Real | Decimal):
        remedy = ": fill in the missing value, or leave the row out" if value is None else ""
        raise ValueError(f"field {name!r} must be text or a number, not {type(value).__name__}{remedy}")
    check_values(value if isinstance(value, str | int) else float(value), f"field {name!r}")
    return str(value)
