"""Converts between tokens and text of turns: the thought, the content and the calls, also while they are sampled."""

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from forge.data.special_tokens import UNFINISHED
from forge.data.writer import thought_of
from forge_envs.dialogue import Dialogue

from .messages import Call, Message, Schema


def render_prompt(dialogue: Dialogue, messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return a conversation in the form that chat templates take, with thoughts and calls in the template's fields.

    Neighbouring messages of the user are joined by an empty line: many templates raise an error unless the roles
    alternate.
    """
    rendered: list[dict[str, Any]] = []
    for message in messages:
        converted = _convert_message(message, dialogue)
        if converted["role"] == "user" and rendered and rendered[-1]["role"] == "user":
            rendered[-1] = {"role": "user", "content": f"{rendered[-1]['content']}\n\n{converted['content']}"}
        else:
            rendered.append(converted)
    return rendered


def _convert_message(message: Message, dialogue: Dialogue) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "tool", "name": message.get("name") or "tool", "content": message["content"]}
    converted = {"role": message["role"], "content": message["content"]}
    if message.get("thought"):
        converted["reasoning_content"] = message["thought"]
    calls = message.get("calls", ())

    if calls and dialogue.writes_calls:
        converted["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _call_arguments(call)}}
            for call in calls
        ]
    elif calls:
        parts = [converted["content"], *(_call_text(call, dialogue.syntax) for call in calls)]
        converted["content"] = "\n".join(part for part in parts if part)

    return converted


def _call_arguments(call: Call) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    # A client's history may have arguments that are not a JSON object: they are rendered as one argument.
    return arguments if isinstance(arguments, dict) else {"arguments": call.arguments}


def _call_text(call: Call, syntax: str) -> str:
    """Return a call as the policy would write it in its content, for chat templates that cannot render calls."""
    arguments = _call_arguments(call)
    if syntax == "plain":
        keywords = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        return f"{call.name}({keywords})"
    key = "parameters" if syntax == "llama3" else "arguments"
    text = json.dumps({"name": call.name, key: arguments}, ensure_ascii=False)
    return text if syntax == "llama3" else f"<tool_call>\n{text}\n</tool_call>"


OPENING, CLOSING = "<think>", "</think>"
# The text that starts a call, by syntax. In other syntaxes, text and calls cannot be distinguished until the turn is
# complete, so that no text is yielded before.
_MARKS = {"hermes": "<tool_call>", "glm": "<tool_call>", "qwen_xml": "<tool_call>"}


class TurnReader:
    """Parser of the tokens of one turn, during sampling and as a whole.

    Args:
        dialogue: the policy's conversion of tokens to text.
        tools: what the turn may call; without tools no text is read as a call.
        is_thinking: whether the prompt ends with the mark that opens the thought.
        stop: strings at which the content ends.
        is_plain: whether it is a completion without a chat template: it has neither thoughts nor calls, and its white
            space is kept.

    Attributes:
        stopped: the stop string that has ended the content; None: none of them so far.
        thought_tokens: of the turn that was read, how many are its thought.
    """

    def __init__(
        self,
        dialogue: Dialogue,
        tools: Sequence[Schema] = (),
        *,
        is_thinking: bool = False,
        stop: Sequence[str] = (),
        is_plain: bool = False,
    ) -> None:
        self.dialogue, self.tools, self.is_thinking, self.stop = dialogue, tools, is_thinking, tuple(stop)
        self.is_plain = is_plain
        self.stopped: str | None = None
        self.thought_tokens = 0
        self._marks = (*self.stop, *([_MARKS[dialogue.syntax]] if tools and dialogue.syntax in _MARKS else []))
        hides = dialogue.syntax in ("harmony", "mistral", "deepseek") or (tools and dialogue.syntax not in _MARKS)
        self._shows = is_plain or not hides
        self._shown = {"thought": 0, "content": 0}  # characters that were yielded
        # The decoded text, and the numbers of the tokens where its last piece starts and ends. New tokens are decoded
        # together with this piece: a token's text may depend on the tokens just before it.
        self._text = ""
        self._last_piece = (0, 0)

    def read(self, tokens: Sequence[int], make_id: Callable[[], str], *, truncated: bool = False) -> Message:
        """Return the complete turn as the assistant's message.

        Args:
            tokens: all tokens of the turn.
            make_id: returns a new id for each of its calls.
            truncated: whether the turn was cut at the limit of tokens.
        """
        if self.is_plain:
            text = self.dialogue.text(tokens, truncated=truncated)
            return {"role": "assistant", "content": self._before_stop(text)}
        action = self.dialogue.read(tokens, self.tools, truncated=truncated)

        # Without a readable call the whole text is the content, so that a client sees a malformed call as text.
        text = action.content if action.calls or self.dialogue.syntax == "harmony" else action.text
        thought, content = self._split_thought(text)
        message: Message = {"role": "assistant", "content": self._before_stop(content).strip()}
        if thought.strip():
            message["thought"] = thought.strip()
            # The first tokens of the turn whose text has the tag that ends the thought.
            self.thought_tokens = bisect_left(
                range(len(tokens)),
                True,
                key=lambda count: CLOSING in self.dialogue.text(tokens[:count], truncated=True),
            )
        if action.calls:
            message["calls"] = [
                Call(make_id(), call.name, json.dumps(dict(call.arguments), ensure_ascii=False))
                for call in action.calls
            ]

        return message

    def grow(self, tokens: Sequence[int]) -> int | None:
        """Decode the tokens of the turn so far, and search its content for a stop string.

        Args:
            tokens: all tokens so far.

        Returns:
            The number of tokens with which the first stop string is complete; None: there is no stop string.
        """
        piece_start, decoded_end = self._last_piece
        text_before = self.dialogue.text(tokens[piece_start:decoded_end])
        text_now = self.dialogue.text(tokens[piece_start:])
        # A character of several tokens is added once it is complete.
        if len(text_now) > len(text_before) and not text_now.endswith(UNFINISHED):
            self._text += text_now[len(text_before) :]
            self._last_piece = (decoded_end, len(tokens))
        if not self.stop or self._first_stop(self._content_of(self._text)) is None:
            return None

        # A stop string is complete: find the token that completes it, among the new ones.
        for count in range(decoded_end + 1, len(tokens) + 1):
            self.stopped = self._first_stop(self._content_of(self.dialogue.text(tokens[:count])))
            if self.stopped is not None:
                return count
        return None

    def news(self) -> Iterator[tuple[str, str]]:
        """Yield new text of the turn that later tokens cannot change.

        Yields:
            ("thought" or "content", text)
        """
        if self._shows:
            thought, content = self._split_thought(self._text, complete=False)
            yield from self._new_text("thought", thought)
            yield from self._new_text("content", _certain_text(content, self._marks))

    def remaining_text(self, message: Message) -> Iterator[tuple[str, str]]:
        """Yield the text of the complete turn that `news` has not yielded, as ("thought" or "content", text)."""
        yield from self._new_text("thought", message.get("thought", ""))
        yield from self._new_text("content", message["content"])

    def _new_text(self, kind: str, text: str) -> Iterator[tuple[str, str]]:
        # White space at the end is held back until other text follows: the message of a complete turn is stripped.
        text = text if self.is_plain else text.strip()
        if len(text) > self._shown[kind]:
            yield kind, text[self._shown[kind] :]
            self._shown[kind] = len(text)

    def _content_of(self, text: str) -> str:
        return self._split_thought(text, complete=False)[1]

    def _first_stop(self, content: str) -> str | None:
        return min((stop for stop in self.stop if stop in content), key=content.find, default=None)

    def _before_stop(self, content: str) -> str:
        stop = self._first_stop(content)
        return content if stop is None else content[: content.find(stop)]

    def _split_thought(self, text: str, complete: bool = True) -> tuple[str, str]:
        """Return the thought and the content of a turn's text.

        Args:
            complete: whether this is the whole turn. Otherwise an end that may become a mark belongs to neither.
        """
        if self.is_plain:
            return "", text
        if CLOSING in text:
            return thought_of({"content": text})
        if self.is_thinking or text.lstrip().startswith(OPENING):
            thought = text.lstrip().removeprefix(OPENING)
            return thought if complete else _certain_text(thought, (CLOSING,)), ""
        # So far only white space or the beginning of "<think>".
        if not complete and OPENING.startswith(text.strip()):
            return "", ""
        return "", text


def _certain_text(text: str, marks: Sequence[str]) -> str:
    """Return a text up to its first mark, or up to an end that may become one: "a " of "a <too" for <tool_call>."""
    end = len(text)
    for mark in marks:
        mark_start = text.find(mark)
        if mark_start < 0:
            # The longest beginning of the mark with which the text ends.
            sizes = (size for size in range(min(len(mark), len(text)), 0, -1) if text.endswith(mark[:size]))
            mark_start = len(text) - next(sizes, 0)
        end = min(end, mark_start)
    return text[:end]
