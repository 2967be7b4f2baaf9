"""Supervised data: a stream of episodes from conversations, prompts with answers, or plain text."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..models.tokenizer import encode_prompt, open_tokenizer
from ..types import Episode, Prompt, Sample
from .chat import ChatFormat
from .columns import read_text_field
from .config import RowsConfig, SupervisedConfig
from .files import PathOrRows, Row
from .messages import MESSAGE_FIELDS, read_messages
from .prompts import PROMPT_FIELDS, PromptFormat
from .stream import RowStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMPLETION = "completion"
Marked = tuple[list[int], list[bool]]  # token ids, and the mask: True on the trained ones
# Settings that only supervised data have, with their defaults.
_OWN_DEFAULTS = {"train_on": "assistant", "thoughts": "keep", "text_field": None, "messages_field": None}
# The settings that have an effect on rows of each form.
_EFFECTIVE: dict[str, tuple[str, ...]] = {
    "tokens": (),
    "plain text": ("text_field",),
    "conversations": ("messages_field", "chat_template", "chat_options", "train_on", "thoughts"),
    "prompts with answers": PROMPT_FIELDS,
}


class SupervisedDataset(RowStream[Episode, SupervisedConfig]):
    """An iterator of `Episode`: its mask is True on the trained tokens, its advantage is 1.

    The first row decides the form of all rows:

    - tokens, if it has the fields `token_ids` and `trained` (a truth value for each token), as recorded traffic does;
    - plain text, if `text_field` is set: all tokens after the first are trained;
    - a conversation, if `messages_field` is set or there is a field messages or conversations (see `forge.data.chat`);
      a field tools holds the tools that it offers;
    - otherwise a prompt with its answer, each a text or a list of messages: with `chat_template` they become a
      conversation, without one eos ends the answer.

    Tokens after the last trained one are dropped. Settings are the fields of `forge.data.config.SupervisedConfig`. A
    setting without effect on the form of the rows is an error.
    """

    SECTION = SupervisedConfig

    def __init__(self, path: PathOrRows = None, **settings: Any) -> None:
        super().__init__(path, **settings)
        section = self.settings
        if self._too_long == "truncate" and self._limit is None:
            raise ValueError("dataset.too_long: truncate needs dataset.max_tokens")
        self._text_field, self._messages_field = section.text_field, section.messages_field
        self._set_fields = find_differing(section)
        self.check()

    def begin(self, row: Row) -> None:
        """Choose the form of all rows from the first row: tokens, plain text, conversations, or prompts with answers.

        Raises:
            ValueError: a setting has no effect on this form, or a prompt has no `target_field`.
        """
        settings = self.settings
        self._chat: ChatFormat | None = None
        self._format: PromptFormat | None = None
        self._has_tokens = {"token_ids", "trained"} <= row.keys()
        if self._messages_field is None and self._text_field is None and "prompt_field" not in self._set_fields:
            self._messages_field = next((name for name in MESSAGE_FIELDS if name in row), None)

        if self._has_tokens:
            form = "tokens"
        elif self._text_field is not None:
            form = "plain text"
        elif self._messages_field is not None:
            form = "conversations"
        else:
            form = "prompts with answers"

        own_settings = {name: settings[name] for name, default in _OWN_DEFAULTS.items() if settings[name] != default}
        check_effects({**self._set_fields, **own_settings}, _EFFECTIVE[form], form)

        # Tokens and plain text need no format.
        if form == "conversations":
            template, options = self._set_fields.get("chat_template", True), self._set_fields.get("chat_options")
            self._chat = ChatFormat(self.tokenizer, template, options, settings.thoughts)
        elif form == "prompts with answers":
            if settings.target_field is None:
                raise ValueError("dataset.target_field must name the field with the answer to train on")
            fields = {name: settings[name] for name in PROMPT_FIELDS}
            # The default also finds the answer under TRL's name for it.
            if settings.target_field == "answer" and "answer" not in row and COMPLETION in row:
                fields["target_field"] = COMPLETION
            self._format = PromptFormat(self.tokenizer, **fields)

    def make(self, number: int, row: Row, index: int) -> Episode | None:
        """Return the episode of a row, whose mask is True on the trained tokens; None if the row is too long."""
        tokens, mask = close_tokens(*self._encode_row(row))
        if self._too_long == "truncate":
            tokens, mask = tokens[: self._limit], mask[: self._limit]
            if not any(mask):
                self.leave_out(f"longer than {self.LIMIT}={self._limit}")
                return None
        elif not self.fits(len(tokens)):
            return None
        episode = Episode.given(tokens, mask)
        if self._format is not None:
            episode.images = self._format.images(row)
        return episode

    def _encode_row(self, row: Row) -> Marked:
        """Return the token ids of a row of the chosen form, and the mask of its trained tokens."""
        if self._has_tokens:
            tokens = token_ids(row, "token_ids", self.tokenizer)
            if len(row["trained"]) != len(tokens):
                raise ValueError(
                    f"token_ids and trained must have equal lengths, got {len(tokens)} and {len(row['trained'])}"
                )
            return tokens, list(map(bool, row["trained"]))

        # A prompt with its answer: messages, or texts.
        if self._format is not None:
            name = str(self._format.target_field)
            has_messages = isinstance(row.get(name), list) and self._format.is_conversation(row)
            answer = read_messages(row, name) if has_messages else self._format.render(row)[1]
            return self._format.answered(row, answer)

        # A whole conversation, or plain text.
        if self._chat is not None:
            messages = read_messages(row, str(self._messages_field))
            messages, chat = self._chat.with_row(row, messages)
            return chat.encode(messages, train_on=self.settings.train_on)

        tokens = encode_document(read_text_field(row, str(self._text_field)), self.tokenizer)
        return tokens, [False] + [True] * (len(tokens) - 1)


def close_tokens(tokens: list[int], mask: list[bool]) -> Marked:
    """Return the tokens and their mask, cut after the last trained token.

    Raises:
        ValueError: no token is trained, or the first one is, which no context predicts.

    >>> close_tokens([5, 6, 7, 8], [False, True, True, False])
    ([5, 6, 7], [False, True, True])
    """
    if not any(mask):
        raise ValueError("the row has no token to train on")
    if mask[0]:
        raise ValueError("the row must have at least one token before the first trained token")
    # Tokens after the last trained one cost time and train nothing.
    end = len(mask) - mask[::-1].index(True)
    return tokens[:end], mask[:end]


def token_ids(row: Row, name: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the token ids that a row holds in the field `name`.

    Raises:
        ValueError: the field is missing, is not a list of integers, or has one outside the tokenizer's vocabulary.
    """
    ids = row.get(name)
    size = len(tokenizer)
    # `type(...) is int`, since True and False are also instances of int.
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < size for token in ids):
        raise ValueError(
            f"field {name!r} must be a list of token ids below {size}, the size of the tokenizer's vocabulary"
        )
    return ids


def encode_document(text: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the token ids of a text, with eos as the last one.

    Raises:
        ValueError: the text is empty, or the tokenizer has no eos token.
    """
    if not text.strip():
        raise ValueError("the text is empty, so it has no token to train on: remove the row")
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no eos token, which is needed to end a text: set eos_token in tokenizer_config.json"
        )
    tokens = encode_prompt(text, tokenizer)
    return tokens if tokens[-1:] == [tokenizer.eos_token_id] else [*tokens, tokenizer.eos_token_id]


def find_differing(settings: RowsConfig) -> dict[str, Any]:
    """Return {name: value} of the PROMPT_FIELDS that a dataset section sets to other values than their defaults."""
    fields = type(settings).model_fields
    names = [name for name in PROMPT_FIELDS if name in fields]
    return {name: settings[name] for name in names if settings[name] != fields[name].default}


def check_effects(settings: Mapping[str, Any], used: tuple[str, ...], form: str) -> None:
    """Check that every setting has an effect on rows of this form.

    Args:
        settings: those that differ from their defaults.
        used: names of the settings that this form reads.
        form: its name in the message, such as "plain text".

    Raises:
        ValueError: a setting is not one of `used`.
    """
    idle = [name for name in settings if name not in used]
    if idle:
        raise ValueError(f"the rows are {form}, to which {', '.join(idle)} does not apply: omit it")


def make_samples(episodes: Sequence[Episode], tokenizer: str) -> list[Sample]:
    """Return one sample for each episode, for evaluation: its target is the last trained span, decoded without special
    tokens, and its prompt is all tokens before that span.

    Args:
        tokenizer: Hugging Face folder or hub id.
    """
    loaded_tokenizer = open_tokenizer(tokenizer)
    samples = []
    for index, episode in enumerate(episodes):
        # The last trained span: it ends after the last True, and starts after the last False before that.
        end = len(episode.mask) - episode.mask[::-1].index(True)
        start = 1 + max((position for position in range(end) if not episode.mask[position]), default=-1)
        context = episode.tokens[:start]
        target = loaded_tokenizer.decode(episode.tokens[start:end], skip_special_tokens=True)
        # The special token that ends the span also ends an answer.
        stop_ids = tuple(token for token in episode.tokens[end - 1 : end] if token in loaded_tokenizer.all_special_ids)
        text = str(loaded_tokenizer.decode(context))
        prompt = Prompt(text, tuple(context), index, stop_ids=stop_ids, images=episode.images)
        samples.append(Sample(prompt, str(target)))

    return samples
