"""Messages in the form that a chat template reads: thoughts, tool calls, and marks in place of words."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

Message = dict[str, Any]
Render = Callable[..., str]  # (messages, add_generation_prompt=) -> text

MARK = "\ue000answer\ue001"  # private characters, which JSON leaves as they are
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_INLINE = re.compile(r"\A\s*<think>.*</think>|</think>\n", re.DOTALL)  # an answer may name the tag


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
    """Converter of the thoughts and tool calls of messages to the form that a chat template reads.

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
        unchanged.

        Raises:
            ValueError: the template writes no tool calls, not as many, or none in a message that also has text.
        """
        calls = message.get("tool_calls")
        thought_fields = [name for name in THOUGHTS if isinstance(message.get(name), str)]
        has_inline_thought = self._fields and not self._splits and _INLINE.search(message["content"] or "")
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
            if (as_text := self.form(bool(message["content"]), len(calls) > 1)) is None:
                subject = (
                    "tool calls" if self.form() is None else f"{len(calls)} tool calls alongside the text of a message"
                )
                raise ValueError(f"the chat template does not render {subject}: use a template that does")
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
        plain[-1]["function"]["arguments"] = {mark: 0}  # a key: Gemma 4 writes special tokens around texts
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
