"""Turns of the policy as text: the thought, the content and the calls, complete or while they are sampled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forge.data.special_tokens import UNFINISHED
from forge.data.turns import thought_of
from forge_envs.dialogue import Dialogue

from .messages import Message, Schema

OPENING = "<think>"
# What begins a call, in the syntaxes that have text before it. Others show a turn once it is complete.
_MARKS = {"hermes": "<tool_call>", "glm": "<tool_call>", "qwen_xml": "<tool_call>"}


@dataclass(frozen=True, slots=True)
class TurnText:
    """The text of a turn, its calls as (name, JSON text of the arguments)."""

    content: str
    thought: str = ""
    calls: tuple[tuple[str, str], ...] = ()


class TurnReader:
    """Reads the tokens of one turn.

    Args:
        dialogue: of the policy.
        tools: what the turn may call; without tools nothing is a call.
        is_thinking: whether its prompt has opened the thought.
        stop: strings before which the content ends.
    """

    def __init__(
        self, dialogue: Dialogue, tools: Sequence[Schema] = (), *, is_thinking: bool = False, stop: Sequence[str] = ()
    ) -> None:
        self.dialogue, self.tools, self.is_thinking, self.stop = dialogue, tools, is_thinking, stop
        self._shown = {"thought": 0, "content": 0}

    def read(self, tokens: Sequence[int], *, truncated: bool = False) -> TurnText:
        """The complete turn."""
        action = self.dialogue.read(tokens, self.tools, truncated=truncated)
        # A turn without one readable call says what it says, so that its reader sees the malformed one.
        text = action.content if action.calls else action.text
        if self.dialogue.syntax == "harmony":
            text = action.content
        thought, content = self._split(text)
        calls = tuple((call.name, json.dumps(dict(call.arguments), ensure_ascii=False)) for call in action.calls)
        return TurnText(self._before_stop(content).strip(), thought.strip(), calls)

    def stop_in(self, tokens: Sequence[int]) -> tuple[str, int] | None:
        """The stop string that ends the content, and the number of tokens until it is complete; None: there is none."""
        if not self.stop:
            return None
        name = self._first_stop(self._content(tokens))
        if name is None:
            return None
        count = next(n for n in range(1, len(tokens) + 1) if self._first_stop(self._content(tokens[:n])) is not None)
        return name, count

    def news(self, tokens: Sequence[int]) -> Iterator[tuple[str, str]]:
        """What of the turn is certain by now and was not returned before: ("thought" or "content", text)."""
        if self.tools and self.dialogue.syntax not in _MARKS:
            return
        if self.dialogue.syntax in ("harmony", "mistral", "deepseek"):
            return
        text = self.dialogue.text(tokens)
        while text.endswith(UNFINISHED):
            text = text[:-1]
        thought, content = self._split(text, complete=False)
        content = self._certain(content)
        yield from self._new("thought", thought.lstrip())
        yield from self._new("content", content.lstrip())

    def rest(self, text: TurnText) -> Iterator[tuple[str, str]]:
        """What of the complete turn `news` has not returned."""
        yield from self._new("thought", text.thought)
        yield from self._new("content", text.content)

    def _new(self, kind: str, text: str) -> Iterator[tuple[str, str]]:
        # White space at the end is shown once something follows it: a complete turn has none.
        text = text.rstrip()
        if len(text) > self._shown[kind]:
            yield kind, text[self._shown[kind] :]
            self._shown[kind] = len(text)

    def _content(self, tokens: Sequence[int]) -> str:
        return self._split(self.dialogue.text(tokens), complete=False)[1]

    def _first_stop(self, content: str) -> str | None:
        places = {stop: content.find(stop) for stop in self.stop}
        present = {stop: place for stop, place in places.items() if place >= 0}
        return min(present, key=present.__getitem__) if present else None

    def _before_stop(self, content: str) -> str:
        stop = self._first_stop(content)
        return content if stop is None else content[: content.find(stop)]

    def _certain(self, content: str) -> str:
        """The content up to the first possible call or stop string."""
        content = self._before_stop(content)
        marks = [*self.stop, *([_MARKS[self.dialogue.syntax]] if self.tools else [])]
        end = len(content)
        for mark in marks:
            place = content.find(mark)
            end = min(end, place) if place >= 0 else end
            # The text may end within a mark.
            partial = next((n for n in range(min(len(mark), len(content)), 0, -1) if content.endswith(mark[:n])), 0)
            end = min(end, len(content) - partial)
        return content[:end]

    def _split(self, text: str, complete: bool = True) -> tuple[str, str]:
        """The thought and the content of a text."""
        if "</think>" in text:
            return thought_of({"content": text})
        opened = text.lstrip().startswith(OPENING)
        if self.is_thinking or opened:
            thought = text.lstrip().removeprefix(OPENING)
            return (thought, "") if complete else (_without_partial(thought, "</think>"), "")
        if not complete and OPENING.startswith(text.strip()):
            return "", ""
        return "", text


class TextReader(TurnReader):
    """Reads the tokens of a completion, whose text has neither thoughts nor calls, and keeps its white space."""

    def read(self, tokens: Sequence[int], *, truncated: bool = False) -> TurnText:
        """The complete text."""
        return TurnText(self._before_stop(self.dialogue.text(tokens, truncated=truncated)))

    def news(self, tokens: Sequence[int]) -> Iterator[tuple[str, str]]:
        """What of the text is certain by now and was not returned before."""
        yield from self._new("content", self._certain(self.dialogue.text(tokens).rstrip(UNFINISHED)))

    def _new(self, kind: str, text: str) -> Iterator[tuple[str, str]]:
        if len(text) > self._shown[kind]:
            yield kind, text[self._shown[kind] :]
            self._shown[kind] = len(text)

    def _split(self, text: str, complete: bool = True) -> tuple[str, str]:
        return "", text


def turn_message(text: TurnText, call_ids: Sequence[str]) -> Message:
    """A turn as the message that its client gets."""
    from .messages import Call

    message: Message = {"role": "assistant", "content": text.content}
    if text.thought:
        message["thought"] = text.thought
    if text.calls:
        message["calls"] = [Call(name_id, *call) for name_id, call in zip(call_ids, text.calls, strict=True)]
    return message


def _without_partial(text: str, mark: str) -> str:
    """The text without a beginning of the mark at its end."""
    size = next((n for n in range(min(len(mark), len(text)), 0, -1) if text.endswith(mark[:n])), 0)
    return text[: len(text) - size]
