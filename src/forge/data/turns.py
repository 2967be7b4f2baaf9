"""Turns of the assistant in a chat template: where they end, and conversations that keep their thoughts.

Many templates leave the thoughts of earlier turns out, so that no single text holds what the policy read and wrote in
each of its turns. `kept` joins chunks instead: each turn as the template writes it while it is the last, and
between two turns what the template puts there. Of one turn this is the template's own text. Environments continue
their episodes with the same chunks, so that conversations and episodes have the same tokens.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property

from .special_tokens import SpecialTokens
from .writer import MARK, Message, Render, Writer, thought_of

Span = tuple[int, int]
_OPENED = re.compile(r"<think>\s*\Z")  # a generation prompt that starts the thought
_OPENING = re.compile(r"<think>\s*(</think>\s*)?\Z")


class Rewritten(ValueError):
    """Error: the chat template renders a turn, or the messages before it, differently once later messages follow."""


def after_mark(text: str, mark: str = MARK) -> str:
    """Return the part of a text after the mark.

    Raises:
        Rewritten: the text has no mark, since the template left it out.

    >>> after_mark("user: ask assistant: MARK<end>", "MARK")
    '<end>'
    """
    _, present, text_after = text.rpartition(mark)
    if not present:
        raise Rewritten("the chat template omits or changes the text of an assistant message")
    return text_after


class Turns:
    """Finder of the starts and ends of assistant turns in the text that a chat template renders.

    Args:
        render: returns the template's text of messages.
        writer: of the same template.
        special: the tokenizer's special tokens.
        borrowed: by the role of the next message, the token that starts it and ends a turn; "" where turns have ends.
    """

    def __init__(self, render: Render, writer: Writer, special: SpecialTokens, borrowed: Mapping[str, str]) -> None:
        self._render, self._writer, self._special, self.borrowed = render, writer, special, borrowed

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
        closing_tokens = self._special.find(self.tail([{"role": "user", "content": "ask"}, call], 1))
        if closing_tokens is None:
            return ""
        return self.closer if self.closer in closing_tokens[1] else self._special.texts(closing_tokens[1])[-1]

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

        if (found_after_turn := self._special.find(after_answer)) is None:
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
        if (match := self._special.find(text)) is None:
            return None

        first, run = match

        # Calls may end in their own special tokens, before the one that ends the turn.
        closer = next((end for end in (self.closer, self.closer_of_calls) if end and end in run), first[0])
        start = first.start() + run.index(closer)
        return start, start + len(closer)

    def tail(self, conversation: Sequence[Message], turn: int) -> str:
        """Return the text that the template writes after the content of message `turn` when that message is the last
        one."""
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
        """Return the rendered text from the end token of an assistant turn, through the given messages, to the next
        assistant turn.

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
            raise Rewritten(
                "the chat template renders the messages before a turn differently once later messages follow"
            )
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
            raise ValueError(
                "a conversation must start with a message that the assistant answers, and have an assistant message"
            )

        if turns != [len(conversation) - 1]:
            self.check_ends()

        # What the template writes before the first turn, between turns, and after the last one.
        chunks = [self._render(conversation[: turns[0]], add_generation_prompt=True)]
        for turn, following in zip(turns, [*turns[1:], len(conversation)], strict=True):
            continued = following < len(conversation)
            chunk = self.between(conversation, turn, conversation[turn + 1 : following], continued)
            chunks.append(self._skip_end(conversation, turn, chunk))

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

    def _skip_end(self, conversation: Sequence[Message], turn: int, text: str) -> str:
        """Return the text after the token that ends message `turn`, given the text after the message's content.
        Rewritten: there is no such token."""
        if (span := self.end(text)) is None:
            raise Rewritten(f"message {turn + 1}: the chat template does not end this turn with a special token")
        # Where the start of the next message ends a turn, that of another role than expected comes after that end.
        is_other = any(self.borrowed.values()) and text[slice(*span)] != self.ending(conversation, turn)[0]
        return text[span[0] if is_other else span[1] :]

    def _answer_text(self, conversation: Sequence[Message], turn: int) -> str:
        """Return the text that the policy writes in its turn, with the token that ends it."""
        context = self._render(conversation[:turn], add_generation_prompt=True)
        rendered = self._render(conversation[: turn + 1])
        closer, suffix = self.ending(conversation, turn)
        if not closer or not rendered.endswith(closer + suffix):
            raise Rewritten(f"message {turn + 1}: the chat template ends this turn differently depending on its text")

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
                raise Rewritten(f"message {turn + 1}: the chat template renders the messages before it differently")
            thought += "\n" if thought else ""
            # The template may have left the thought out, or have written it once without the tag that opens it.
            _, words = thought_of({"content": written[len(before_thought) :]})
            answer = f"{thought}</think>\n\n{words.lstrip()}"
        else:
            raise Rewritten(
                f"message {turn + 1}: the template's generation prompt is not the start of its assistant messages"
            )

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
                raise Rewritten(f"message {turn + 1}: the chat template renders the messages before it differently")
            unread = self._skip_end(conversation, turn, unread)
