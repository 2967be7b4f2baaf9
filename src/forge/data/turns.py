"""Turns of the assistant in a chat template: where they end, and conversations that keep their thoughts.

Many templates leave the thoughts of earlier turns out, so that no single text holds what the policy read and wrote in
each of its turns. `kept` joins chunks instead: each turn as the template writes it while it is the last, and
between two turns what the template puts there. Of one turn this is the template's own text. Environments continue
their episodes with the same chunks, so that conversations and episodes have the same tokens.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from .special_tokens import SpecialTokens

Message = dict[str, Any]
Span = tuple[int, int]
Render = Callable[..., str]  # (messages, add_generation_prompt=) -> text

MARK = "\ue000answer\ue001"  # private characters, which JSON leaves as they are
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_OPENED = re.compile(r"<think>\s*\Z")  # a generation prompt that starts the thought
_OPENING = re.compile(r"<think>\s*(</think>\s*)?\Z")


class Rewritten(ValueError):
    """The template renders a turn, or what precedes it, differently once later messages follow."""


def thought_of(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return the thought of an assistant's message, and its content without the thought, as (thought, content).

    The thought is read from a field such as `reasoning_content`, or from the content up to `</think>`; it is "" where
    there is none.

    >>> thought_of({"content": "<think>Hm.</think>Yes"})
    ('Hm.', 'Yes')
    """
    for name in THOUGHTS:
        if isinstance(message.get(name), str):
            return message[name].strip("\n"), message["content"] or ""
    thought, closing, content = (message["content"] or "").partition("</think>")
    if not closing:
        return "", message["content"] or ""
    return thought.strip().removeprefix("<think>").strip("\n"), content.lstrip("\n")


class Writer:
    """Writes the thoughts and tool calls of messages in the form that a template reads.

    Args:
        source: text of the template.
        render: returns the template's text of messages, which it gets in the form that the template reads.
    """

    def __init__(self, source: str, render: Render) -> None:
        self._render = render
        # The fields of thoughts that the template reads, as `message.thinking` or `message["thinking"]`.
        self._fields = [name for name in THOUGHTS if re.search(rf"""\.{name}\b|["']{name}["']""", source)]
        self._splits = re.search(r"""["']</think>["']""", source)  # not only writes it
        self._forms: dict[tuple[bool, bool], bool | None] = {}

    def message(self, message: Message) -> Message:
        """Return a message with its thought and its tool calls in the form that the template reads; any other message
        as it is.

        Raises:
            ValueError: the template writes no tool calls, not as many, or none in a message that also has text.
        """
        calls = message.get("tool_calls")
        thought_fields = [name for name in THOUGHTS if isinstance(message.get(name), str)]
        has_inline_thought = self._fields and not self._splits and "</think>" in (message["content"] or "")
        if message["role"] != "assistant" or not (calls or thought_fields or has_inline_thought):
            return message

        # The thought goes into the template's field for it, or between tags into the content.
        message = dict(message)
        if thought_fields or has_inline_thought:
            thought, content = thought_of(message)
            for name in thought_fields:
                del message[name]
            if self._fields:
                message |= {self._fields[0]: thought, "content": content}
            else:
                message["content"] = f"<think>\n{thought}\n</think>\n\n{content}" if thought else content

        if calls:
            # Calls in the form that this template writes: arguments as an object, or as JSON text.
            as_text = self.form(bool(message["content"]), len(calls) > 1)
            if as_text is None:
                subject = (
                    "tool calls" if self.form() is None else f"{len(calls)} tool calls alongside the text of a message"
                )
                raise ValueError(f"the chat template has no place for {subject}: take one that writes them")
            message["tool_calls"] = [_make_call(call, as_text) for call in calls]

        return message

    def form(self, with_text: bool = False, several: bool = False) -> bool | None:
        """Return how the template reads the arguments of tool calls: True as JSON text, False as an object, None if it
        writes no such calls.

        Args:
            with_text: in a message that also has text.
            several: two calls in one message.
        """
        case = (with_text, several)
        if case not in self._forms:
            readable = (as_text for as_text in (False, True) if self._check_writing(as_text, with_text, several))
            self._forms[case] = next(readable, None)
        return self._forms[case]

    def _check_writing(self, as_text: bool, with_text: bool, several: bool) -> bool:
        """Return whether the template writes the names, arguments and text of a trial message, all exactly once."""
        # Words that no template has by itself.
        trial_names = ["qzname", "qzother"][: 2 if several else 1]
        calls = [_make_call({"name": name, "arguments": {"qzkey": name + "0"}}, as_text) for name in trial_names]
        answer = {"role": "assistant", "content": "qztext" if with_text else "", "tool_calls": calls}
        try:
            rendered = self._render([{"role": "user", "content": "ask"}, answer])
        except ValueError:
            return False

        has_calls = all(name + "0" in rendered for name in trial_names)
        is_escaped = '\\"qzkey' in rendered  # JSON within JSON
        return has_calls and not is_escaped and ("qztext" in rendered) == with_text

    def mark_turn(self, message: Message, mark: str = MARK) -> Message:
        """Return the message without thoughts, and with `mark` as the last thing that its turn says: as its content, or
        as the argument of its last tool call."""
        message = {name: value for name, value in message.items() if name not in THOUGHTS}
        calls = message.pop("tool_calls", None)
        if not calls or self.form(several=len(calls) > 1) is None:
            return {**message, "content": mark}
        plain = [_make_call({**_make_call(call, False), "arguments": {}}, False) for call in calls]
        plain[-1]["function"]["arguments"] = {"mark": mark}
        return {**message, "content": "", "tool_calls": plain}


def _make_call(call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    """Return a tool call in OpenAI's format, with the type and the id of nine characters that some templates ask for.

    Args:
        as_text: whether its arguments are JSON text, instead of an object.
    """
    function = dict(call.get("function") or {"name": call["name"], "arguments": call.get("arguments", {})})
    arguments = call["arguments"] if "arguments" in call else function.get("arguments", {})
    arguments = {} if arguments is None else arguments
    if isinstance(arguments, str) and not as_text:
        with suppress(ValueError):  # what is not JSON stays the text that it is
            arguments = json.loads(arguments)
    elif as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)

    extra = {name: value for name, value in call.items() if name not in ("name", "arguments")}
    return {"id": "call00000", "type": "function", **extra, "function": {**function, "arguments": arguments}}


def after_mark(text: str, mark: str = MARK) -> str:
    """Return the text after the mark.

    Raises:
        Rewritten: the text has no mark, since the template left it out.

    >>> after_mark("user: ask assistant: MARK<end>", "MARK")
    '<end>'
    """
    _, present, text_after = text.rpartition(mark)
    if not present:
        raise Rewritten("the chat template leaves out or changes what the assistant wrote")
    return text_after


class Turns:
    """Finds where the assistant's turns start and end in the text that a template writes.

    Args:
        render: returns the template's text of messages.
        writer: of the same template.
        special: the tokenizer's special tokens.
    """

    def __init__(self, render: Render, writer: Writer, special: SpecialTokens) -> None:
        self._render, self._writer, self._special = render, writer, special

    @cached_property
    def plain_tail(self) -> str:
        """Return the text that the template writes after the assistant's words when its turn is the last message.
        ValueError: the template renders no such turn."""
        return self.tail([{"role": "user", "content": "ask"}, {"role": "assistant", "content": ""}], 1)

    @cached_property
    def closer(self) -> str:
        """Return the special token that ends a turn of text; "" if none does."""
        match = self._special.find(self.plain_tail)
        return "" if match is None else match[0][0]

    @cached_property
    def closer_of_calls(self) -> str:
        """Return the special token that ends a turn with a tool call; "" if the template writes no calls."""
        if self._writer.form() is None:
            return ""
        call = {"role": "assistant", "content": "", "tool_calls": [{"name": "tool", "arguments": {}}]}
        return self.ending([{"role": "user", "content": "ask"}, call], 1)[0]

    @cached_property
    def _closes_only_last(self) -> bool:
        """Return whether the template ends only the last turn of the assistant with a special token: after an earlier
        turn there is none, or only one that starts a conversation, which the policy does not write."""
        question = {"role": "user", "content": MARK + "asked"}
        answer = {"role": "assistant", "content": MARK}
        try:
            opening_text = self._render([question])
            after_answer = self._render([question, answer, question]).split(MARK)[2]  # up to the next question
        except (ValueError, IndexError):  # IndexError: the template leaves a message out
            return False

        if not self.closer:
            return False

        found_after_turn = self._special.find(after_answer)
        if found_after_turn is None:
            return True

        # The special tokens that start a conversation: all before the first text of the template's own.
        opening_tokens = ""
        while next_found := self._special.find(opening_text):
            match, tokens = next_found
            if opening_tokens and opening_text[: match.start()].strip():
                break
            opening_tokens += tokens
            opening_text = opening_text[match.start() + len(tokens) :]

        first_match, tokens_after_turn = found_after_turn
        return self.closer not in tokens_after_turn and first_match[0] in opening_tokens

    def check_ends(self) -> None:
        """Check that all turns are ended. Rewritten: the template ends only the last of several turns."""
        if self._closes_only_last:
            raise Rewritten("the chat template ends an assistant's turn with a special token in the last message only")

    def end(self, text: str) -> Span | None:
        """Return the span (start, end) of the token that ends a turn, in the text that follows the turn's words.

        It is the token that ends a turn of text, if the first special tokens include it, else the first special token.
        None: there is no special token.
        """
        match = self._special.find(text)
        if match is None:
            return None

        first, run = match

        # Calls may end in their own special tokens, before the one that ends the turn.
        if self.closer not in run:
            return first.span()
        start = first.start() + run.index(self.closer)
        return start, start + len(self.closer)

    def tail(self, conversation: Sequence[Message], turn: int) -> str:
        """Return the text that the template writes after the words of message `turn`, when it is the last message."""
        return after_mark(self._render([*conversation[:turn], self._writer.mark_turn(conversation[turn])]))

    def ending(self, conversation: Sequence[Message], turn: int) -> tuple[str, str]:
        """Return the token that ends message `turn` when it is the last message, and the text after that token; ("",
        "") if no special token ends it."""
        tail = self.tail(conversation, turn)
        span = self.end(tail)
        return ("", "") if span is None else (tail[span[0] : span[1]], tail[span[1] :])

    def between(self, conversation: Sequence[Message], turn: int, later: Sequence[Message], continued: bool) -> str:
        """Return the text from the token that ends message `turn`, which is included, to the end of the later messages.

        Args:
            later: the messages that follow the turn.
            continued: whether the text continues to the start of the assistant's next turn.
        """
        messages = [*conversation[:turn], self._writer.mark_turn(conversation[turn]), *later]
        return after_mark(self._render(messages, add_generation_prompt=continued))

    def following(self, messages: Sequence[Message]) -> str:
        """Return the text from the token that ends an assistant's turn, through these messages, up to its next turn.

        It is the same text after any turn.

        Raises:
            Rewritten: the text depends on the turn, or what precedes the turn changes once messages follow.
        """
        self.check_ends()

        # One call for each result of a tool, or only one where the template writes no more in a message.
        tool_names = [str(message.get("name") or "tool") for message in messages if message["role"] == "tool"]
        if self._writer.form(several=True) is None:
            tool_names = tool_names[:1]
        calls = [{"function": {"name": name, "arguments": {}}} for name in tool_names]
        trial_opening: list[Message] = [
            {"role": "user", "content": "ask"},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]

        # Any turn with these calls stands for all: only its end and what follows matter.
        context = self._render(trial_opening[:1], add_generation_prompt=True)
        conversation = [trial_opening[0], self._writer.mark_turn(trial_opening[1]), *messages]
        text = self._render(conversation, add_generation_prompt=True)
        after_turn = after_mark(text)
        span = self.end(after_turn)
        if span is None or not text.startswith(_OPENING.sub("", context)):
            raise Rewritten("the chat template renders what precedes a turn differently once messages follow")
        return after_turn[span[0] :]

    def kept(self, conversation: Sequence[Message]) -> tuple[str, dict[int, Span]]:
        """Return the text of a conversation with the thoughts of all turns, and {index of an assistant's message: span
        of its turn in the text}.

        Raises:
            Rewritten: the template changes more than thoughts once later messages follow.
            ValueError: it does not end turns with a special token, or the conversation starts with the assistant.
        """
        turns = [index for index, message in enumerate(conversation) if message["role"] == "assistant"]
        if not turns or turns[0] == 0:
            raise ValueError("a conversation starts with a message that the assistant answers")

        if turns != [len(conversation) - 1]:
            self.check_ends()

        # What the template writes before the first turn, between turns, and after the last one.
        chunks = [self._render(conversation[: turns[0]], add_generation_prompt=True)]
        for turn, following in zip(turns, [*turns[1:], len(conversation)], strict=True):
            continued = following < len(conversation)
            chunk = self.between(conversation, turn, conversation[turn + 1 : following], continued)
            if (end := self.end(chunk)) is None:
                raise Rewritten(f"message {turn + 1}: the chat template does not end its turn with a special token")
            chunks.append(chunk[end[1] :])

        # The same texts must stand in the whole conversation, or the template changes more than thoughts.
        self._compare_chunks(conversation, turns, chunks)
        text = chunks[0]
        spans: dict[int, Span] = {}
        for turn, chunk in zip(turns, chunks[1:], strict=True):
            start = len(text)
            text += self._answer_text(conversation, turn)
            spans[turn] = (start, len(text))
            text += chunk

        return text, spans

    def _answer_text(self, conversation: Sequence[Message], turn: int) -> str:
        """Return the text that the policy writes in its turn, with the token that ends it."""
        context = self._render(conversation[:turn], add_generation_prompt=True)
        rendered = self._render(conversation[: turn + 1])
        closer, suffix = self.ending(conversation, turn)
        if not closer or not rendered.endswith(closer + suffix):
            raise Rewritten(f"message {turn + 1}: the end of its turn depends on what it says")

        # The words follow the generation prompt, or start with a thought that the prompt opened.
        written = rendered[: len(rendered) - len(closer + suffix)]
        thought, _ = thought_of(conversation[turn])

        if written.startswith(context):
            answer = written[len(context) :]
            if thought and thought.strip() not in answer:
                answer = f"<think>\n{thought}\n</think>\n\n{answer}"
        elif opened := _OPENED.search(context):
            before_thought = context[: opened.start()]
            if not written.startswith(before_thought):
                raise Rewritten(f"message {turn + 1}: the chat template renders its context differently")
            thought += "\n" if thought else ""
            # The template may have left the thought out, or have written it once without the tag that opens it.
            _, words = thought_of({"content": written[len(before_thought) :]})
            answer = f"{thought}</think>\n\n{words.lstrip()}"
        else:
            raise Rewritten(f"message {turn + 1}: the generation prompt is not how its answers start")

        return answer + closer

    def _compare_chunks(self, conversation: Sequence[Message], turns: list[int], chunks: list[str]) -> None:
        """Check that each chunk stands before its turn in the text of the whole conversation. Rewritten: one does
        not."""
        marks = {turn: f"{MARK}{order}\ue002" for order, turn in enumerate(turns)}
        marked = [
            self._writer.mark_turn(message, marks[index]) if index in marks else message
            for index, message in enumerate(conversation)
        ]

        # The text of the whole conversation, read from one mark to the next; the chunk after the last turn is not read.
        unread = self._render(marked)
        for turn, chunk in zip(turns, chunks, strict=False):
            before_turn, mark, unread = unread.partition(marks[turn])
            if not mark or not before_turn.startswith(_OPENING.sub("", chunk)):
                raise Rewritten(f"message {turn + 1}: the chat template renders its context differently")
            if (end := self.end(unread)) is None:
                raise Rewritten(f"message {turn + 1}: the chat template does not end its turn with a special token")
            unread = unread[end[1] :]
