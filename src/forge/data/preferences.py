"""Preference pairs: a stream of a chosen and a rejected episode."""

from random import Random
from typing import Any

from ..types import Episode, Pair
from .chat import ChatFormat, Message
from .columns import read_text_field
from .config import PreferencesConfig
from .files import PathOrRows, Row
from .messages import MESSAGE_FIELDS, read_messages
from .prompts import QUESTION_FIELDS, PromptFormat
from .sources import load_task
from .stream import RowStream
from .supervised import Marked, check_effects, close_tokens, encode_document, find_differing


class PreferenceDataset(RowStream[Pair, PreferencesConfig]):
    """An iterator of `Pair`, a chosen and a rejected episode; their masks are True on the answers and on the tokens
    that end them.

    The first row decides the form of all rows:

    - a prompt and two texts: the prompt is rendered as in `PromptDataset`; with `chat_template` each answer is a turn
      after it, without one eos ends it;
    - two lists of messages, whole conversations or answers to a prompt (text or messages): the context is their common
      beginning, and all turns of the assistant after it are the answer (see `forge.data.chat`);
    - two texts without a prompt: the context is the common beginning of their tokens;
    - a procedural task: its right answer, and a wrong one that follows from the seed and the row's number.

    Pairs of equal answers, in text or in tokens, are left out and counted in `skipped`.

    Settings are the fields of `forge.data.config.PreferencesConfig`. A setting without effect on the form of the rows
    is an error; `chat_template` and `chat_options` also apply to conversations. Whole conversations need no
    `prompt_field`: if it is set, they must start with it.

    Args:
        as_scores: for a reward model: the masks are True only on the last token, where the model reads its score.
    """

    SECTION, NOUN = PreferencesConfig, "pair"

    def __init__(self, path: PathOrRows = None, *, as_scores: bool = False, **settings: Any) -> None:
        super().__init__(path, **settings)
        section = self.settings
        self._as_scores = as_scores
        self._fields = (section.chosen_field, section.rejected_field)
        self._set_fields = find_differing(section)

        self._task = None if section.task is None else load_task(section.task)
        if self._task is not None and self._fields != ("chosen", "rejected"):
            raise ValueError(
                "dataset.task generates both answers: omit dataset.chosen_field and dataset.rejected_field"
            )
        if self._task is not None and not hasattr(self._task, "wrong"):
            raise ValueError(
                f"task {section.task!r} needs a method wrong(answer, rng), which generates rejected answers"
            )
        self.check()

    def begin(self, row: Row) -> None:
        """Choose the form of all pairs from the first row. ValueError: a setting has no effect on this form."""
        section = self.settings
        self._chat: ChatFormat | None = None
        self._format: PromptFormat | None = None
        usual_fields = (name for name in (*QUESTION_FIELDS, *MESSAGE_FIELDS) if name in row)
        self._prompt_field = self._set_fields.get("prompt_field") or next(usual_fields, None)

        # Conversations, a prompt with two texts, or two texts; a setting without effect on the form is an error.
        if self._task is None and isinstance(row.get(self._fields[0]), list):
            check_effects(self._set_fields, ("chat_template", "chat_options", "prompt_field"), "conversations")
            template, options = self._set_fields.get("chat_template", True), self._set_fields.get("chat_options")
            self._chat = ChatFormat(self.tokenizer, template, options, section.thoughts)
        elif section.thoughts != "keep":
            raise ValueError(
                f"dataset.thoughts is only for conversations, but {self._fields[0]} is not a list of messages: omit it"
            )
        elif self._prompt_field is not None or "prompt_template" in self._set_fields:
            names = ("prompt_template", "prompt_field", "chat_template", "system_prompt", "chat_options")
            fields = {name: self.settings[name] for name in names}
            if self._prompt_field in MESSAGE_FIELDS:
                fields["prompt_field"] = self._prompt_field
            self._format = PromptFormat(self.tokenizer, **fields)
        else:
            check_effects(self._set_fields, (), "texts without a prompt")

    def make(self, number: int, row: Row, index: int) -> Pair | None:
        """Return the pair of a row; None if it is left out, since it is too long or its answers are equal."""
        if (task := self._task) is not None:
            wrong = task.wrong(row["answer"], Random(f"{task.name}/{self.seed}/{number}"))
            row = {**row, "chosen": row["answer"], "rejected": wrong}

        # Equal in text or in tokens: nothing to prefer.
        answers = [close_tokens(*marked) for marked in self._encode_pair(row) or ()]
        if not answers or answers[0][0] == answers[1][0]:
            self.leave_out(f"alike in {' and '.join(self._fields)}")
            return None

        chosen, rejected = answers
        if not self.fits(max(len(chosen[0]), len(rejected[0]))):
            return None

        if self._as_scores:
            # A reward model is trained on the score of the last token only.
            chosen, rejected = ((tokens, [False] * (len(tokens) - 1) + [True]) for tokens, _ in (chosen, rejected))
        return Pair(Episode.given(*chosen), Episode.given(*rejected))

    def _encode_pair(self, row: Row) -> tuple[Marked, Marked] | None:
        """Return the tokens and masks of the chosen and the rejected answer in their context; None if the answers are
        equal."""
        if self._chat is not None:
            chosen, rejected, since = self._read_conversations(row)
            if chosen == rejected:
                return None

            # `with_row` puts the row's system message in front, of the rejected conversation as well.
            messages, chat = self._chat.with_row(row, chosen)
            system = messages[: len(messages) - len(chosen)]
            since += len(system)
            return chat.encode(messages, since=since), chat.encode([*system, *rejected], since=since)

        chosen_text, rejected_text = (read_text_field(row, name) for name in self._fields)
        if chosen_text == rejected_text:
            return None
        if self._format is not None:
            return self._format.answered(row, chosen_text), self._format.answered(row, rejected_text)

        # Documents without a prompt: what both start with is the prompt.
        first, second = encode_document(chosen_text, self.tokenizer), encode_document(rejected_text, self.tokenizer)
        if first == second:
            return None

        # Both end with eos, so they differ before the end of the shorter one.
        differing = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
        if not (shared := next(differing, len(first))):
            raise ValueError(
                "chosen and rejected have no common start that could be the prompt: set dataset.prompt_field"
            )
        first_mask, second_mask = ([False] * shared + [True] * (len(tokens) - shared) for tokens in (first, second))
        return (first, first_mask), (second, second_mask)

    def _read_conversations(self, row: Row) -> tuple[list[Message], list[Message], int]:
        """Return the chosen and the rejected conversation, and the index of the first message in which they differ.
        ValueError: that message is not the assistant's."""
        chosen, rejected = (self._read_conversation(row, name) for name in self._fields)
        differing = (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b)
        since = next(differing, min(len(chosen), len(rejected)))

        for name, conversation in zip(self._fields, (chosen, rejected), strict=True):
            role = conversation[since]["role"] if since < len(conversation) else "none"
            if role != "assistant" and chosen != rejected:
                raise ValueError(
                    f"the two differ from message {since + 1} on, where {name} must have an assistant message, but "
                    f"its role is {role}"
                )
        return chosen, rejected, since

    def _read_conversation(self, row: Row, name: str) -> list[Message]:
        """Return the whole conversation in the field `name`: its messages, after the row's prompt if they are only an
        answer. ValueError: `prompt_field` is set, and the conversation starts with another prompt."""
        conversation, prompt_field = read_messages(row, name), self._prompt_field
        is_answer_only = conversation[0]["role"] == "assistant"
        if prompt_field is None or not (is_answer_only or "prompt_field" in self._set_fields):
            return conversation

        # The prompt may be text or messages, with a system message or without.
        is_conversation = isinstance(row.get(prompt_field), list)
        prompt = (
            read_messages(row, prompt_field)
            if is_conversation
            else [{"role": "user", "content": read_text_field(row, prompt_field)}]
        )
        if is_answer_only:
            return [*prompt, *conversation]

        # A system message of the conversation only counts if the prompt has one as well.
        first_after_system = next((i for i, message in enumerate(conversation) if message["role"] != "system"), 0)
        start = 0 if prompt[0]["role"] == "system" else first_after_system
        start_messages = [(m["role"], m["content"].strip()) for m in conversation[start : start + len(prompt)]]

        if start_messages != [(m["role"], m["content"].strip()) for m in prompt]:
            raise ValueError(
                f"{name} does not start with the text of field {prompt_field!r}: omit dataset.prompt_field"
            )
        return conversation
