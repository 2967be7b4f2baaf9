"""Rows to prompts: fields, template, chat format, tokens; and the dataset of prompts."""

import random
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from string import Formatter
from typing import Any

from ..config.plugin import hint_nearest, resolve
from ..models.tokenizer import encode_prompt
from ..types import Conversation, Prompt, Sample
from .chat import ChatFormat, Message
from .columns import plain_columns, read_text_field, with_ground_truth
from .config import DatasetConfig
from .files import PathOrRows, Row
from .messages import OPTIONS, SYSTEM_FIELDS, read_messages, with_system
from .stream import RowStream

QUESTION_FIELDS = ("prompt", "question", "problem", "input")  # TRL and verl keep a question beside its prompt
TARGET_FIELDS = ("answer", "target", "solution", "ground_truth")  # that the default of target_field finds
LETTERS = string.ascii_uppercase
PROMPT_FIELDS = (
    *("prompt_template", "target_field", "prompt_field", "target_pattern"),
    *("chat_template", "system_prompt", "chat_options", "choices_field", "images_field"),
)


@dataclass(slots=True)
class PromptFormat:
    """Format in which dataset rows are rendered as prompts and targets.

    Its fields are settings of `forge.data.config.DatasetConfig`, which describes them.

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
    images_field: str | None = None
    chat: ChatFormat | None = field(init=False, default=None)
    _dialogue_chat: ChatFormat | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.chat_template:
            self.chat = ChatFormat(self.tokenizer, self.chat_template, self.chat_options)
        elif self.system_prompt or self.chat_options:
            raise ValueError("system_prompt and chat_options need chat_template: true")
        elif self.images_field:
            raise ValueError("images_field needs chat_template: true")

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

        if (self.choices_field is not None) != ("choices" in self._column_names()):
            raise ValueError("choices_field must be set if and only if prompt_template has {choices}")

    def _column_names(self) -> set[str]:
        try:
            names = {name for _, name, _, _ in Formatter().parse(self.prompt_template) if name is not None}
        except ValueError as error:
            raise ValueError(
                f"prompt_template {self.prompt_template!r}: {error} (write {{{{ and }}}} for braces)"
            ) from error

        if not all(re.fullmatch(r"[^\d\W]\w*", name) for name in names):
            fault = "braces hold one field name; write {{ and }} for braces"
            raise ValueError(f"prompt_template {self.prompt_template!r}: {fault}")
        return names

    def fields(self, row: Iterable[str]) -> dict[str, str]:
        """Return {name in braces in the prompt template: the row's column that fills it in}, without `choices`.

        `row` is a row, or the names of its columns.

        Raises:
            ValueError: the row lacks a column of the template, of the options or of the target.
        """
        column_names = list(row)
        question = self.prompt_field or next((name for name in QUESTION_FIELDS if name in column_names), "question")
        template_names = self._column_names() - {"choices"}
        template_fields = {name: question if name == "question" else name for name in template_names}
        options = [self.choices_field] if isinstance(self.choices_field, str) else self.choices_field or []
        required_columns = [
            self.prompt_field,
            *template_fields.values(),
            *options,
            self.target_field,
            self.images_field,
        ]
        hints = {
            question: "; set prompt_field to the column of the prompt, or text_field to one of plain text (SFT)",
            self.target_field: "; set target_field to null for prompts without a target, or to the answer's column",
        }
        for name in required_columns:
            if name is not None and name not in column_names:
                hint = hint_nearest(name, column_names, list_all=False) or hints.get(name, "")
                raise ValueError(f"no field {name!r}: the row has {', '.join(column_names)}{hint}")
        return template_fields

    def is_conversation(self, row: Row) -> bool:
        """Return whether the prompt of a row is a list of messages. ValueError: it is, and prompt_template or
        choices_field is set, which do nothing for messages."""
        name = self.prompt_field or next((name for name in QUESTION_FIELDS if name in row), "")
        if not isinstance(row.get(name), list):
            return False
        if self.prompt_template != "{question}" or self.choices_field is not None:
            raise ValueError(
                f"field {name!r} is a conversation, to which dataset.prompt_template and dataset.choices_field do not "
                "apply: omit them"
            )
        return True

    def render(self, row: Row) -> tuple[str, str]:
        """Return the user's text and the target of a row, as (text, target). The text of a conversation is that of its
        last message; without `target_field` the target is "".

        Raises:
            ValueError: a field is missing or empty, or `target_pattern` finds nothing.
        """
        if self.is_conversation(row):
            name = self.fields(row)["question"]
            return read_messages(row, name)[-1]["content"], self._read_target(row, [])

        # The question from its template, with lettered options if there are any.
        columns = self.fields(row)
        is_default = self.prompt_field is None and columns.get("question") == "input"
        if is_default and row.get("instruction") and "instruction" not in columns:
            raise ValueError(
                "the row has the columns instruction and input: set dataset.prompt_template to a text with both, such "
                'as "{instruction}\\n\\n{input}", or dataset.prompt_field to one of them'
            )

        fields = {name: read_text_field(row, column) for name, column in columns.items()}
        options = self._read_options(row)
        lettered = (f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))
        text = self.prompt_template.format(**fields, choices="\n".join(lettered))
        if not text.strip():
            raise ValueError("the prompt is empty: fill in its field, or remove the row")
        return text, self._read_target(row, options)

    def _read_target(self, row: Row, options: list[str]) -> str:
        """Return the target of a row: of several `options` the letter of the right one, else the target's text, of it
        what `target_pattern` selects, or "" without `target_field`."""
        if self.target_field is None:
            return ""

        target = read_text_field(row, self.target_field)
        if self.target_pattern is not None:
            match = re.search(self.target_pattern, target)
            if match is None or match[1] is None:
                raise ValueError(
                    f"target_pattern {self.target_pattern!r} does not match the target, which ends with "
                    f"{target[-60:]!r}"
                )
            target = match[1].strip()

        if not target.strip():
            raise ValueError(f"field {self.target_field!r}, the target, is empty: fill it in, or remove the row")
        return self._find_letter(row[self.target_field], target, options) if options else target

    def _read_options(self, row: Row) -> list[str]:
        """Return the options of a multiple-choice row in the order of their letters; empty without `choices_field`.
        ValueError: two options are equal, one is empty, or their list has fewer than 2 or more than 26."""
        if self.choices_field is None:
            return []

        if isinstance(self.choices_field, str):
            listed = row[self.choices_field]
            if not isinstance(listed, list) or not 2 <= len(listed) <= len(LETTERS):
                raise ValueError(f"field {self.choices_field!r} must be a list of 2 to 26 options, not {listed!r:.60}")
            numbered = {f"{self.choices_field}[{index}]": option for index, option in enumerate(listed)}
            options = [read_text_field(numbered, name).strip() for name in numbered]
        else:
            options = [read_text_field(row, name).strip() for name in self.choices_field]
            # Shuffled, as the first column is often the right answer. The seed is the options themselves, so that a row
            # is the same in every epoch and process.
            random.Random(repr(sorted(options))).shuffle(options)

        # One letter must be right: equal or empty options would make it two.
        if len(set(options)) < len(options) or not all(options):
            raise ValueError(f"the options must be distinct and not empty, got {options!r:.80}")
        return options

    def _find_letter(self, value: object, target: str, options: list[str]) -> str:
        """Return the letter of the option that a target names: by its text, or in a list of options also by its
        position from 0 or its letter. `value` is the target as it stands in the row. ValueError: it names none."""
        target = target.strip()
        if isinstance(self.choices_field, str):
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(options):
                return LETTERS[value]
            if target in LETTERS[: len(options)]:
                return target
            if target.isdecimal() and int(target) < len(options) and target not in options:
                return LETTERS[int(target)]

        if target not in options:
            raise ValueError(f"the target {target!r:.60} must name one of the {len(options)} options")
        return LETTERS[options.index(target)]

    def dialogue(self, row: Row, read: Iterable[str] = ()) -> tuple[list[Message], ChatFormat] | None:
        """Return the messages of a row's prompt, with its system message or else `system_prompt`, and the chat format
        that renders them with the row's tools and arguments; None for a text without a chat template.

        Args:
            read: names of columns that something else reads, such as a reward.

        Raises:
            ValueError: they are no messages, the last one is the assistant's, the tokenizer has no chat template, or a
                text without a chat template has a column that only a chat template writes.
        """
        used_columns = {*self.fields(row).values(), str(self.target_field)}
        if self.is_conversation(row):
            messages_field = self.fields(row)["question"]
            messages = read_messages(row, messages_field)
            if messages[-1]["role"] == "assistant":
                raise ValueError(
                    f"field {messages_field!r} ends with an assistant message: remove it, because a prompt must end "
                    "before the answer"
                )
            # A conversation can be written in no other way than by a chat template.
            if self._dialogue_chat is None:
                self._dialogue_chat = self.chat or ChatFormat(self.tokenizer, True, self.chat_options)
            chat = self._dialogue_chat
        elif self.chat is None:
            for name in {*SYSTEM_FIELDS, "tools", OPTIONS} - {*used_columns, *read}:
                if row.get(name):
                    raise ValueError(
                        f"column {name!r} needs a chat template: set dataset.chat_template, or remove the column"
                    )
            return None
        else:
            messages, chat = [{"role": "user", "content": self.render(row)[0]}], self.chat

        messages, chat = chat.with_row(row, messages, used_columns)
        if self.system_prompt and messages[0]["role"] != "system":
            messages = with_system(messages, self.system_prompt)
        if images := self.images(row):
            messages = resolve("forge_families.images:insert_images", "dataset.images_field")(messages, len(images))
        return messages, chat

    def images(self, row: Row) -> tuple[bytes, ...]:
        """Return the bytes of the images of a row. ValueError: an image cannot be read."""
        if self.images_field is None:
            return ()
        return tuple(resolve("forge_families.images:read_images", "dataset.images_field")(row[self.images_field]))

    def answered(self, row: Row, answer: str | list[Message]) -> tuple[list[int], list[bool]]:
        """Return the token ids of a row's prompt with an answer to it, and a mask that is True on the answer and on the
        tokens that end it: eos, or with a chat template the tokens that end a turn. ValueError: there are none."""
        if (dialogue := self.dialogue(row)) is not None:
            messages, chat = dialogue
            answer_messages = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
            ids, mask = chat.encode([*messages, *answer_messages], since=len(messages))
            if not (images := self.images(row)):
                return ids, mask
            expand_answer = resolve("forge_families.images:expand_answer", "dataset.images_field")
            text = chat.render([*messages, *answer_messages])
            return expand_answer(self.tokenizer.name_or_path, text, images, ids, mask)  # type: ignore[no-any-return]

        if self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos token to end an answer with")

        prompt_ids = encode_prompt(self.render(row)[0], self.tokenizer)
        answer_ids = self.tokenizer(answer, add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]
        return [*prompt_ids, *answer_ids], [False] * len(prompt_ids) + [True] * len(answer_ids)


class PromptDataset(RowStream[Sample, DatasetConfig]):
    """An iterator of `Sample(prompt, target)`; its settings are the fields of `forge.data.config.DatasetConfig`."""

    SECTION, NOUN, LIMIT = DatasetConfig, "prompt", "max_prompt_tokens"

    def __init__(self, path: PathOrRows = None, **settings: Any) -> None:
        super().__init__(path, **settings)
        self._format = PromptFormat(self.tokenizer, **{name: self.settings[name] for name in PROMPT_FIELDS})
        self.check()

    def targets(self) -> Iterator[str]:
        """Yield the target of each of `rows`, leaving out rows of which no prompt can be made."""
        for row in self.rows():
            with suppress(ValueError):
                yield self._format.render(with_ground_truth(row))[1]

    def begin(self, row: Row) -> None:
        """Find the column of the target from the first row, if `target_field` has its default and the row has no such
        column."""
        # A column that was named explicitly has to be there.
        section = self.settings
        row = with_ground_truth(row)
        if section.target_field != "answer" or section.target_field in row:
            return
        column = next((name for name in TARGET_FIELDS if name in row), None)
        if column is not None or section.target_required is False:
            self._format.target_field = column

    def make(self, number: int, row: Row, index: int) -> Sample | None:
        """Return the sample of a row, its prompt and target; None if the prompt is too long. ValueError: a column that
        the reward requires is missing."""
        row = with_ground_truth(row)
        for name in self.settings.required_columns:
            if name not in row:
                column_names = ", ".join(row)
                similar = hint_nearest(name, row, list_all=False)
                raise ValueError(
                    f"the reward has a parameter {name!r}, but the data has no such column; it has "
                    f"{column_names}{similar}"
                )

        question, target = self._format.render(row)
        columns = plain_columns(row, self.settings.columns, self.settings.required_columns)

        # An answer to messages ends at the tokens of their chat template, even if other prompts are plain text.
        if (dialogue := self._format.dialogue(row, columns)) is None:
            prompt = Prompt(question, tuple(encode_prompt(question, self.tokenizer)), index, columns)
        else:
            messages, chat = dialogue
            prompt_text = chat.render(messages, add_generation_prompt=True)
            if images := self._format.images(row):
                expand = resolve("forge_families.images:expand_tokens", "dataset.images_field")
                token_ids = tuple(expand(self.tokenizer.name_or_path, prompt_text, images))
            else:
                token_ids = tuple(self.tokenizer(prompt_text, add_special_tokens=False)["input_ids"])

            # What the conversation is made of: its messages, or the question with what comes before it.
            is_conversation = self._format.is_conversation(row)
            prompt_fields = {name: row[name] for name in ("tools", OPTIONS) if row.get(name)}
            if is_conversation:
                prompt_fields["question"] = messages
            else:
                prompt_fields |= {message["role"]: message["content"] for message in messages[:-1]}
            prompt_text = Conversation(prompt_text, {"question": question, **prompt_fields})
            prompt = Prompt(
                prompt_text, token_ids, index, columns, tuple(messages), is_conversation, chat.stop_ids, images
            )

        return Sample(prompt, target) if self.fits(len(prompt.token_ids)) else None
