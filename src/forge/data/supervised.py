"""Supervised data: a stream of episodes from conversations, prompts with answers, or plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..types import Episode, Prompt, Sample
from .chat import MESSAGE_FIELDS, ChatFormat, read_messages
from .config import RowsConfig, SupervisedConfig
from .files import PathOrRows, Row
from .prompts import PROMPT_FIELDS, PromptFormat, read_text_field, with_one_bos
from .stream import RowStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMPLETION = "completion"
_TURNS = {"train_on": "assistant", "thoughts": "keep"}  # settings of conversations, and their defaults
Marked = tuple[list[int], list[bool]]  # tokens, and the mask of those that are trained


class SupervisedDataset(RowStream[Episode, SupervisedConfig]):
    """An iterator of `Episode`: its mask is True on the trained tokens, its advantage is 1.

    The first row decides the form of all: tokens with `token_ids` and `trained`, a truth value for each, as recorded
    traffic has them; plain text with `text_field`, of which all tokens after the first are
    trained; a conversation with `messages_field`, or a field messages or conversations (see `forge.data.chat`), which
    offers the tools in a field tools; else a prompt with its answer, which are texts or lists of messages, as a
    conversation with `chat_template`, closed by eos without one. Tokens after the last trained one are dropped.

    Settings are the fields of `forge.data.config.SupervisedConfig`. A setting without effect on the form of the rows
    is an error; `chat_template` and `chat_options` also apply to conversations.
    """

    SECTION = SupervisedConfig

    def __init__(self, path: PathOrRows = None, **settings: Any) -> None:
        super().__init__(path, **settings)
        section = self.settings
        if self._too_long == "truncate" and self._limit is None:
            raise ValueError("too_long: truncate needs max_tokens")
        self._text_field, self._messages_field = section.text_field, section.messages_field
        self._set_fields = find_differing(section)
        self.check()

    def begin(self, row: Row) -> None:
        """Choose the format from the first row: conversation, prompt with answer, or text."""
        self._chat: ChatFormat | None = None
        self._format: PromptFormat | None = None
        self._has_tokens = {"token_ids", "trained"} <= row.keys()
        of_turns = {n: self.settings[n] for n, default in _TURNS.items() if self.settings[n] != default}
        set_fields = {**self._set_fields, **of_turns}
        if self._messages_field is None and self._text_field is None and "prompt_field" not in self._set_fields:
            self._messages_field = next((name for name in MESSAGE_FIELDS if name in row), None)

        # One form for all rows; a setting without effect on it is an error.
        if self._has_tokens:
            named = {"text_field": self._text_field, "messages_field": self.settings.messages_field}
            check_effects(set_fields | {name: value for name, value in named.items() if value}, (), "tokens")
        elif self._text_field is not None:
            check_effects(set_fields, (), "plain text")
        elif self._messages_field is not None:
            check_effects(set_fields, ("chat_template", "chat_options", *_TURNS), "conversations")
            template, options = self._set_fields.get("chat_template", True), self._set_fields.get("chat_options")
            self._chat = ChatFormat(self.tokenizer, template, options, self.settings.thoughts)
        else:
            check_effects(set_fields, PROMPT_FIELDS, "prompts with answers")
            if self.settings.target_field is None:
                raise ValueError("target_field must name the field of the answer that is to be learnt")
            fields = {name: self.settings[name] for name in PROMPT_FIELDS}
            # TRL's name of an answer, where the settings leave it open.
            if self.settings.target_field == "answer" and "answer" not in row and COMPLETION in row:
                fields["target_field"] = COMPLETION
            self._format = PromptFormat(self.tokenizer, **fields)

    def make(self, number: int, row: Row, index: int) -> Episode | None:
        """Return the episode of a row, with a mask of the trained tokens; None if it is skipped."""
        tokens, mask = close_tokens(*self._encode_row(row))
        if self._too_long == "truncate":
            tokens, mask = tokens[: self._limit], mask[: self._limit]
            if not any(mask):
                self.leave_out(f"longer than {self.LIMIT}={self._limit}")
                return None
        elif not self.fits(len(tokens)):
            return None
        return Episode.given(tokens, mask)

    def _encode_row(self, row: Row) -> Marked:
        if self._has_tokens:
            tokens = token_ids(row, "token_ids", self.tokenizer)
            if len(row["trained"]) != len(tokens):
                raise ValueError(f"it has {len(tokens)} token_ids, and {len(row['trained'])} values of trained")
            return tokens, list(map(bool, row["trained"]))

        # A prompt with its answer: messages, or texts.
        if self._format is not None:
            if not self._format.is_conversation(row):
                return self._format.answered(*self._format.render(row))
            messages, chat = self._format.dialogue(row)
            name = str(self._format.target_field)
            answer = row.get(name)
            if isinstance(answer, str):
                answer = [{"role": "assistant", "content": answer}]
            return chat.encode([*messages, *read_messages({name: answer}, name)], since=len(messages))

        # A whole conversation, or plain text.
        if self._chat is not None:
            messages = read_messages(row, str(self._messages_field))
            return self._chat.with_tools(row.get("tools")).encode(messages, train_on=self.settings.train_on)
        tokens = encode_document(read_text_field(row, str(self._text_field)), self.tokenizer)
        return tokens, [False] + [True] * (len(tokens) - 1)


def close_tokens(tokens: list[int], mask: list[bool]) -> Marked:
    """Cut after the last trained token. ValueError: there is none, or the first token is trained."""
    if not any(mask):
        raise ValueError("it holds nothing to learn")
    if mask[0]:
        raise ValueError("nothing precedes the first token that is to be learnt")
    # Tokens after the last trained one cost time and train nothing.
    end = len(mask) - mask[::-1].index(True)
    return tokens[:end], mask[:end]


def token_ids(row: Row, name: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids in a field. ValueError: they are none, or not of this tokenizer."""
    ids = row.get(name)
    size = len(tokenizer)
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < size for token in ids):
        raise ValueError(f"field {name!r} must be a list of token ids below {size}, the size of the tokenizer")
    return ids


def encode_document(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a text, closed by eos. ValueError: it is empty, or the tokenizer has no eos token."""
    if not text.strip():
        raise ValueError("the text is empty")
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos token to end a text with")
    tokens = with_one_bos(list(tokenizer(text)["input_ids"]), tokenizer)
    return tokens if tokens[-1] == tokenizer.eos_token_id else [*tokens, tokenizer.eos_token_id]


def find_differing(settings: RowsConfig) -> dict[str, Any]:
    """Return the settings of prompts that differ from their defaults."""
    fields = type(settings).model_fields
    return {n: settings[n] for n in PROMPT_FIELDS if n in fields and settings[n] != fields[n].default}


def check_effects(settings: Mapping[str, Any], used: tuple[str, ...], form: str) -> None:
    """Raise ValueError for a setting without effect on rows of this form."""
    if idle := [name for name in settings if name not in used]:
        raise ValueError(f"the rows are {form}, for which {', '.join(idle)} would do nothing: omit it")


def as_samples(episodes: Sequence[Episode], tokenizer: str) -> list[Sample]:
    """Return samples for evaluation: the last trained span of each episode as the target, without special tokens, and
    the tokens before it as the prompt.

    Args:
        tokenizer: Hugging Face folder or hub id.
    """
    from ..models.tokenizer import open_tokenizer

    reader = open_tokenizer(tokenizer)
    samples = []
    for index, episode in enumerate(episodes):
        end = len(episode.mask) - episode.mask[::-1].index(True)
        start = 1 + max((i for i in range(end) if not episode.mask[i]), default=-1)  # of the last trained span
        context = episode.tokens[:start]
        target = reader.decode(episode.tokens[start:end], skip_special_tokens=True)
        samples.append(Sample(Prompt(str(reader.decode(context)), tuple(context), index), str(target)))

    return samples
