"""Turns of the policy as text: the thought, the content and the calls, complete or while they are sampled."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from forge.data.special_tokens import UNFINISHED
from forge.data.turns import thought_of
from forge_envs.dialogue import Dialogue

from .messages import Call, Message, Schema


def render_prompt(dialogue: Dialogue, messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return a conversation with thoughts and calls in the template's form, neighbouring messages of the user joined:
    many templates take them in turn only."""
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
    # A client's text may be anything.
    return arguments if isinstance(arguments, dict) else {"arguments": call.arguments}


def _call_text(call: Call, syntax: str) -> str:
    """Return a call as the policy writes it, for a template without a place for calls."""
    arguments = _call_arguments(call)
    if syntax == "plain":
        return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
    if syntax == "llama3":
        return json.dumps({"name": call.name, "parameters": arguments}, ensure_ascii=False)
    text = json.dumps({"name": call.name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


OPENING, CLOSING = "<think>", "</think>"
# What starts a call, in the syntaxes that have text before it. Others show a turn once it is complete.
_MARKS = {"hermes": "<tool_call>", "glm": "<tool_call>", "qwen_xml": "<tool_call>"}


class TurnReader:
    """Reads the tokens of one turn, which grow.

    Args:
        dialogue: of the policy.
        tools: what the turn may call; without tools nothing is a call.
        is_thinking: whether its prompt has opened the thought.
        stop: strings before which the content ends.
        is_plain: whether it is a completion, which has neither thoughts nor calls, and keeps its white space.

    Attributes:
        stopped: the stop string that has ended the content.
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
        self._marks = (*self.stop, *([_MARKS[dialogue.syntax]] if tools and dialogue.syntax in _MARKS else []))
        hides = dialogue.syntax in ("harmony", "mistral", "deepseek") or (tools and dialogue.syntax not in _MARKS)
        self._shows = is_plain or not hides
        self._shown = {"thought": 0, "content": 0}
        # The text of the first tokens, and where the last two of its pieces start: later tokens are decoded with these.
        self._text = ""
        self._pieces = (0, 0)

    def read(self, tokens: Sequence[int], make_id: Callable[[], str], *, truncated: bool = False) -> Message:
        """Return the complete turn, as the message that its client gets; `make_id` names its calls."""
        if self.is_plain:
            text = self.dialogue.text(tokens, truncated=truncated)
            return {"role": "assistant", "content": self._before_stop(text)}
        action = self.dialogue.read(tokens, self.tools, truncated=truncated)

        # A turn without one readable call says what it says, so that its reader sees the malformed one.
        text = action.content if action.calls or self.dialogue.syntax == "harmony" else action.text
        thought, content = self._split_thought(text)
        message: Message = {"role": "assistant", "content": self._before_stop(content).strip()}
        if thought.strip():
            message["thought"] = thought.strip()
        if action.calls:
            arguments = [json.dumps(dict(call.arguments), ensure_ascii=False) for call in action.calls]
            calls = zip(action.calls, arguments, strict=True)
            message["calls"] = [Call(make_id(), call.name, text) for call, text in calls]

        return message

    def grow(self, tokens: Sequence[int]) -> int | None:
        """Read the turn so far; return the number of tokens that complete a stop string, None without one."""
        decoded_end = self._pieces[1]
        before, now = (self.dialogue.text(tokens[self._pieces[0] : end]) for end in (decoded_end, len(tokens)))
        # A character of several tokens is taken in once it is complete.
        if len(now) > len(before) and not now.endswith(UNFINISHED):
            self._text += now[len(before) :]
            self._pieces = (decoded_end, len(tokens))
        if not self.stop or self._first_stop(self._content_of(self._text)) is None:
            return None
        for count in range(decoded_end + 1, len(tokens) + 1):
            self.stopped = self._first_stop(self._content_of(self.dialogue.text(tokens[:count])))
            if self.stopped is not None:
                return count
        return None

    def news(self) -> Iterator[tuple[str, str]]:
        """Yield what of the turn is certain by now and was not returned before: ("thought" or "content", text)."""
        if self._shows:
            thought, content = self._split_thought(self._text, complete=False)
            yield from self._new_text("thought", thought)
            yield from self._new_text("content", _certain_text(content, self._marks))

    def rest(self, message: Message) -> Iterator[tuple[str, str]]:
        """Yield what of the complete turn `news` has not returned."""
        yield from self._new_text("thought", message.get("thought", ""))
        yield from self._new_text("content", message["content"])

    def _new_text(self, kind: str, text: str) -> Iterator[tuple[str, str]]:
        # White space at the end is shown once something follows it: a complete turn has none.
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
        """Return the thought and the content of a text."""
        if self.is_plain:
            return "", text
        if CLOSING in text:
            return thought_of({"content": text})
        if self.is_thinking or text.lstrip().startswith(OPENING):
            thought = text.lstrip().removeprefix(OPENING)
            return thought if complete else _certain_text(thought, (CLOSING,)), ""
        if not complete and OPENING.startswith(text.strip()):
            return "", ""
        return "", text


def _certain_text(text: str, marks: Sequence[str]) -> str:
    """Return a text up to the first mark, or to what may become one at its end."""
    end = len(text)
    for mark in marks:
        mark_start = text.find(mark)
        if mark_start < 0:
            sizes = (size for size in range(min(len(mark), len(text)), 0, -1) if text.endswith(mark[:size]))
            mark_start = len(text) - next(sizes, 0)
        end = min(end, mark_start)
    return text[:end]
