"""Conversations to tokens and a mask of the assistant's turns, through the tokenizer's chat template.

The whole conversation is rendered and tokenized once, and the mask follows from character positions. Nothing is
tokenized in pieces, so that the tokens match inference.
"""

import copy
import logging
import re
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..config.plugin import hint_nearest
from ..system.files import read_text
from .files import Row
from .messages import row_options, row_system, with_system
from .special_tokens import SpecialTokens
from .template_traits import find_missing_end, needs_parts, omits_thought, split_content, trim_end
from .turns import Rewritten, Span, Turns
from .writer import Message, Writer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

A = TypeVar("A")
TrainOn = Literal["assistant", "last"]
Thoughts = Literal["keep", "template"]

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MAX_SHAPES = 1000  # orders of roles that are remembered to be written in full

log = logging.getLogger(__name__)
_offered: set[str] = set()  # templates that were checked to have a place for tools


class ChatFormat:
    """Renders conversations as text, and encodes them as tokens with a mask of the assistant's turns.

    Args:
        tokenizer: for `encode` a fast one, which knows the characters of its tokens.
        template: True for the tokenizer's chat template; else the text of a jinja template, or a file with it.
        options: additional arguments of the template, such as enable_thinking.
        thoughts: what `encode` does with thoughts of earlier turns, which many templates omit once later messages
            follow. "keep": each turn stays as it was when it was the last, so that all are trained
            (`forge.data.turns`); "template": the text is the template's, and training a turn that it changes later is
            an error.
        key: the setting that names the template, for errors.

    Attributes:
        turns: where turns end (`forge.data.turns.Turns`).

    Raises:
        ValueError, FileNotFoundError: the tokenizer has no chat template, the file does not exist, or the template
            reads no option of that name.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        template: bool | str = True,
        options: Mapping[str, Any] | None = None,
        thoughts: Thoughts = "keep",
        key: str = "chat_template",
    ) -> None:
        self.tokenizer, self.options, self.thoughts = tokenizer, dict(options or {}), thoughts

        # A text with braces is itself a template, any other text the path of one.
        self._own_template = not isinstance(template, str)
        if isinstance(template, str):
            if "{" not in template:
                file = Path(template).expanduser()
                if len(template) > 4096 or not file.is_file():
                    raise FileNotFoundError(
                        f"{key} {template!r:.200} is neither a jinja template nor a file (in {Path.cwd()})"
                    )
                template = read_text(file)
            self.template = template
        elif not tokenizer.chat_template:
            raise ValueError(f"the tokenizer has no chat template: use a chat model, or set {key} to a jinja template")

        self._special = SpecialTokens(tokenizer)

        # Of this format and of those with more arguments: the tokenizer for `encode`, once it is used, the orders of
        # roles that the template writes in full, and the tokens that it writes after a turn only if messages follow.
        self._shared: dict[str, Any] = {"shapes": set(), "ends": {}}
        self._begin_text()

        # A template ignores what it does not know. Tools that it does not read are another matter.
        unread = [name for name in self.options if name != "tools" and not re.search(rf"\b{name}\b", self.template)]
        if unread:
            raise ValueError(
                f"chat_options: the chat template does not use the option {unread[0]!r}"
                + hint_nearest(unread[0], re.findall(r"\w+", self.template)).partition("; known here")[0]
            )

    def _begin_text(self) -> None:
        if self._own_template:
            self.template = self.tokenizer.get_chat_template(tools=self.options.get("tools"))
        self.writer = Writer(self.template, self._render_text)
        self.turns = Turns(self.render, self.writer, self._special, self._shared["ends"])

    @property
    def exported(self) -> str | None:
        """Return the template with its arguments as defaults, for the tokenizer of a model that was trained with them;
        None if it is the tokenizer's own without arguments."""
        defaults = [
            f"{{%- if {n} is not defined %}}{{%- set {n} = {v!r} %}}{{%- endif %}}" for n, v in self.options.items()
        ]
        return None if self._own_template and not defaults else "".join(defaults) + self.template

    def with_row(
        self, row: Row, messages: Sequence[Message], read: Container[str] = ()
    ) -> "tuple[list[Message], ChatFormat]":
        """Return a row's messages, system message first, and the format with the row's tools and template arguments
        (`row_system`, `row_options`).

        Args:
            read: names of the columns that something else reads.

        Raises:
            ValueError: one of these is malformed, or there are two system messages.
        """
        return with_system(messages, row_system(row, read)), self.with_options(row_options(row))

    def with_options(self, options: Mapping[str, Any]) -> "ChatFormat":
        """Return a format with additional template arguments, such as `tools`; without any, the same format.

        Special tokens in them become plain text. A template that writes no tools is warned of once.
        """
        if not options:
            return self

        _ = self.stop_ids  # cached before copying, so that all copies share them

        # Only what depends on the arguments is made again.
        extended = copy.copy(self)
        extended.options = {**self.options, **self._special.inert_values(dict(options))}
        extended._begin_text()
        if "tools" in options and self.template not in _offered:
            _offered.add(self.template)
            trial = [{"role": "user", "content": "ask"}]
            # A template that needs more than this reports what it lacks when it is used.
            with suppress(ValueError):
                if extended._render_text(trial) == self._render_text(trial):
                    log.warning(
                        "the chat template does not render tools, so the model does not see them: set "
                        "episode.template (for rows dataset.chat_template) to one that does, such as chatml"
                    )

        return extended

    def render(self, conversation: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return the text that the template writes for a conversation.

        Args:
            add_generation_prompt: whether the text ends with the start of the assistant's next turn.

        Raises:
            ValueError: the template raises an error, or writes no tool calls.
        """
        self._check_roles(conversation)
        return self._render_text(self._write_messages(conversation), add_generation_prompt=add_generation_prompt)

    def _write_messages(self, conversation: Sequence[Message]) -> list[Message]:
        """Return the messages in the form that the chat template reads."""
        # Special tokens in messages of others become plain text, so that they start or end no turn. An assistant's
        # stay: it may write them, as around a tool call.
        plain = (m if m["role"] == "assistant" else self._special.inert_values(m) for m in conversation)
        return list(map(self.writer.message, plain))

    def _check_roles(self, conversation: Sequence[Message]) -> None:
        """Check that the template writes every message that is not the assistant's. ValueError: it omits one."""
        roles = [message["role"] if str(message["content"] or "").strip() else "" for message in conversation]
        shape = ("tools" in self.options, *roles)
        written_shapes: set[tuple[bool | str, ...]] = self._shared["shapes"]
        if shape in written_shapes:
            return

        # Words that no template has by itself, instead of what the messages say.
        marker_words = {i: f"qz{i}said" for i, role in enumerate(roles) if role not in ("", "assistant")}
        trial = [{**m, "content": marker_words[i]} if i in marker_words else m for i, m in enumerate(conversation)]
        try:
            text = self._render_text(self._write_messages(trial))
        except ValueError:  # the same error, or one about the words, follows from the conversation itself
            return

        if omitted := [i for i, word in marker_words.items() if word not in text]:
            raise ValueError(
                f"message {omitted[0] + 1}: the chat template omits this message of role {roles[omitted[0]]}: use a "
                "template that renders it"
            )
        if len(written_shapes) < _MAX_SHAPES:
            written_shapes.add(shape)

    def _render_text(self, conversation: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        text = self._apply_template(conversation, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt or not conversation or conversation[-1]["role"] != "assistant":
            return text

        follower = "tool" if conversation[-1].get("tool_calls") else "user"
        ends: dict[str, str] = self._shared["ends"]
        if follower not in ends:
            ends[follower] = ""  # while the template is tried
            missing_end = find_missing_end(self._apply_template, self.writer, self._special, follower)
            ends[follower] = "" if missing_end == self.tokenizer.bos_token else missing_end
        return text + ends[follower]

    def _apply_template(self, conversation: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        options = {**self.options, "tokenize": False, "add_generation_prompt": add_generation_prompt}

        def apply(messages: list[Message]) -> str:
            return self._call_template(
                lambda: str(self.tokenizer.apply_chat_template(messages, chat_template=self.template, **options))
            )

        if "parts" not in self._shared:
            self._shared["parts"] = needs_parts(apply)
        return apply(self._split_contents(conversation))

    def _split_contents(self, messages: Sequence[Message]) -> list[Message]:
        return list(map(split_content, messages)) if self._shared["parts"] else list(messages)

    def encode(
        self, conversation: Sequence[Message], *, train_on: TrainOn = "assistant", since: int = 0
    ) -> tuple[list[int], list[bool]]:
        """Return the token ids of the whole conversation, and a mask that is True on the assistant's turns.

        A turn is the text after its generation prompt, up to the token that ends it, which is included; or the text
        that the template marks with `{% generation %}`. A token is True if any of its characters belongs to a turn,
        since the policy could not learn that character otherwise.

        Args:
            train_on: "assistant": all turns of the assistant; "last": only its last one.
            since: index of the first message that is trained.

        Raises:
            ValueError: there is no such turn, or the template renders it differently once later messages follow.
        """
        turns = [i for i, message in enumerate(conversation) if i >= since and message["role"] == "assistant"]
        turns = [i for i in (turns[-1:] if train_on == "last" else turns) if conversation[i].get("trained", True)]
        if not turns:
            roles = ", ".join(m["role"] + " of weight 0" * (not m.get("trained", True)) for m in conversation)
            raise ValueError(f"no assistant message to train on; the roles are {roles}")

        text = self.render(conversation)
        encoding = self._untrimmed_tokenizer.encode(text, add_special_tokens=False)

        # Each turn ends where generation would stop: at a special token, if one follows its text.
        token_ends = [end for _, end in encoding.offsets]
        closers = {end for token, end in zip(encoding.ids, token_ends, strict=True) if token in self._special.ids}
        spans: list[Span] = []
        rewritten: Rewritten | None = None
        try:
            # The template marks the spans of turns, or they follow from its texts before and after each.
            if _MARK.search(self.template):
                spans = self._choose_marked(conversation, turns, text, closers)
            else:
                spans = [self._encode_answer(conversation, turn, text, closers) for turn in turns]
        except Rewritten as error:
            rewritten = error

        # Where the template rewrites a turn or omits its thought, join the turns as they were when each was last.
        written = [text[start:end] for start, end in spans] if len(spans) == len(turns) else [text] * len(turns)
        omitted = any(omits_thought(turn, conversation[i]) for i, turn in zip(turns, written, strict=True))
        if self.thoughts == "keep" and (rewritten or omitted):
            try:
                text, turn_spans = self.turns.kept(conversation)
            except Rewritten as error:
                raise rewritten or error from None  # the first error names the fix
            spans = [turn_spans[turn] for turn in turns]
            encoding = self._untrimmed_tokenizer.encode(text, add_special_tokens=False)
        elif rewritten:
            raise rewritten

        # Half-open spans overlap if each starts before the other ends.
        mask = [any(first < end and start < last for start, end in spans) for first, last in encoding.offsets]
        return encoding.ids, mask

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Return the ids of the tokens that end a turn: one of text, one with tool calls, and eos."""
        ends: list[str] = []
        with suppress(ValueError):  # it renders prompts only
            ends += [self.turns.closer, self.turns.closer_of_calls]
        ids = [self.tokenizer.convert_tokens_to_ids(end) for end in ends if end]
        eos = self.tokenizer.eos_token_id
        return tuple(dict.fromkeys(ids if eos is None else [*ids, eos]))  # type: ignore[arg-type]

    @property
    def _untrimmed_tokenizer(self) -> Any:
        """Return a copy of the tokenizer whose offsets include spaces, which some tokenizers exclude from them."""
        from tokenizers import processors

        if not self.tokenizer.is_fast:
            raise ValueError("conversations need a fast tokenizer (use_fast), which maps tokens to characters")

        if "untrimmed" not in self._shared:
            backend = copy.deepcopy(self.tokenizer.backend_tokenizer)  # type: ignore[attr-defined]
            backend.post_processor = processors.ByteLevel(trim_offsets=False)
            backend.no_truncation()
            backend.no_padding()
            self._shared["untrimmed"] = backend
        return self._shared["untrimmed"]

    def _encode_context(self, conversation: Sequence[Message], turn: int, text: str) -> str:
        """Return the policy's prompt for message `turn`. Rewritten: `text`, of the whole conversation, does not start
        with it."""
        context = self.render(conversation[:turn], add_generation_prompt=True)
        if not text.startswith(context):
            last_turn_fault = (
                "with and without the answer: set a dataset.chat_template whose generation prompt is how assistant "
                "messages start"
            )
            fix = _REWRITES if turn + 1 < len(conversation) else last_turn_fault
            raise Rewritten(f"message {turn + 1}: the chat template renders the messages before it differently {fix}")
        return context

    def _encode_answer(self, conversation: Sequence[Message], turn: int, text: str, closers: set[int]) -> Span:
        """Return the span of message `turn` in the text of the whole conversation, with the token that ends it.

        Args:
            closers: the positions in the text where a special token ends.
        """
        if turn == 0:
            raise ValueError("message 1 has role assistant: remove it, or set dataset.train_on: last")

        context = self._encode_context(conversation, turn, text)
        upto = text if turn == len(conversation) - 1 else self.render(conversation[: turn + 1])
        if not text.startswith(upto) or not upto.startswith(context):
            raise Rewritten(f"message {turn + 1}: the chat template renders this message differently {_REWRITES}")

        answer = upto[len(context) :]

        if answer == conversation[turn]["content"]:
            raise ValueError(
                f"message {turn + 1}: the chat template writes no end after an assistant turn, so the policy would "
                "not learn to stop: use a template that ends turns, as with {{ eos_token }}"
            )

        # Generation stops at a special token. Many templates add a line break after it, and some the header of the next
        # turn, which are not generated.
        start = len(context)
        closer, tail = self.turns.ending(conversation, turn)
        if closer and answer.endswith(closer + tail):
            return start, len(upto) - len(tail)
        return start, trim_end(upto, closers)

    def _choose_marked(
        self, conversation: Sequence[Message], turns: list[int], text: str, closers: set[int]
    ) -> list[Span]:
        """Return the marked spans of the given turns, each up to its end token; arguments as `_encode_answer`'s."""
        if turns != [len(conversation) - 1]:
            self.turns.check_ends()
        start = len(self._encode_context(conversation, turns[0], text)) if turns[0] else 0
        marked = [(first, trim_end(text[:end], closers)) for first, end in self._find_marked(conversation)]
        written = [i for i, message in enumerate(conversation) if message["role"] == "assistant"]
        if len(marked) == len(written):  # what the prompt of a turn begins is not sampled
            prompts = {i: self.render(conversation[:i], add_generation_prompt=True) for i in turns if i}
            starts = {i: len(prompt) for i, prompt in prompts.items() if text.startswith(prompt)}
            spans = zip(written, marked, strict=True)
            return [(max(starts.get(i, 0), first), end) for i, (first, end) in spans if i in turns]
        if excluded := {i for i in written if i > turns[0]} - {*turns}:
            raise ValueError(
                f"message {min(excluded) + 1}: the template's generation markers do not support weight 0 here"
            )
        return [(max(start, first), end) for first, end in marked if end > start]

    def _find_marked(self, conversation: Sequence[Message]) -> list[Span]:
        """Return the spans in the text of a conversation that the template marks with `{% generation %}`."""
        # return_assistant_tokens_mask would lose turns that start with a space if the tokenizer trims its offsets.
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {**self.tokenizer.special_tokens_map, **self.options, "add_generation_prompt": False}
        rendered: Any = self._call_template(
            lambda: render_jinja_template(
                [self._split_contents(self._write_messages(conversation))],
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **options,
            )
        )
        _, spans = rendered
        return [(begin, end) for begin, end in spans[0] if end > begin]

    def _call_template(self, call: Callable[[], A]) -> A:
        try:
            return call()
        except Exception as error:  # templates are programs and raise anything
            raise ValueError(f"the chat template fails: {' '.join(str(error).split())}") from error


_REWRITES = (
    "once later messages follow, so the assistant's text is ambiguous: set dataset.train_on: last, or a "
    "dataset.chat_template that leaves earlier messages unchanged"
)
