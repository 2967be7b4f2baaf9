"""Traits of chat templates: contents as parts, and turns that end where the next message starts."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .special_tokens import SpecialTokens
from .turns import after_mark
from .writer import MARK, Message, Writer, thought_of

Apply = Callable[..., str]  # (messages, add_generation_prompt=) -> the template's text


def split_content(message: Message) -> Message:
    """Return a copy of a message with its text content as a list of parts.

    >>> split_content({"role": "user", "content": "hi"})["content"]
    [{'type': 'text', 'text': 'hi'}]
    """
    text = message.get("content")
    return {**message, "content": [{"type": "text", "text": text}]} if isinstance(text, str) else message


def needs_parts(apply: Apply) -> bool:
    """Return whether a template reads message contents only as lists of parts, as templates of some image models do."""
    question = {"role": "user", "content": "qzask"}
    for message in (question, split_content(question)):
        with suppress(ValueError):
            if "qzask" in apply([message]):
                return message is not question
    return False


def find_missing_end(apply: Apply, writer: Writer, special: SpecialTokens, follower: str) -> str:
    """Return the special token that a template writes after an assistant's turn only if a message follows, as GLM's do.

    GLM's models end their turns with the token that starts the next message.

    Args:
        follower: the role of that message: "tool" after a turn with calls, or "user".

    Returns:
        "" if the turn itself has an end, or the token also starts turns of the assistant.
    """
    calls: list[Any] = [{"name": "tool", "arguments": {}}] if follower == "tool" else []
    trial_turn = {"role": "assistant", "content": "", "tool_calls": calls}
    later = {"role": follower, "content": "more", "name": "tool", "tool_call_id": "call00000"}
    question = {"role": "user", "content": MARK}

    with suppress(ValueError):  # the template writes no such messages
        turn = writer.mark_turn(trial_turn)
        tail, continued = (after_mark(apply([question, turn, *more])) for more in ([], [later]))
        next_tokens = special.find(continued)
        prompt = after_mark(apply([question], add_generation_prompt=True))
        if next_tokens and special.find(tail) is None:
            token = next_tokens[0][0]
            return token if token not in prompt and continued.startswith(tail + token) else ""
    return ""


def omits_thought(written: str, message: Message) -> bool:
    """Return whether the text of an assistant's turn lacks the thought of its message.

    >>> omits_thought("It is 4.", {"content": "It is 4.", "reasoning_content": "4"})
    True
    """
    thought, words = thought_of(message)
    return thought not in written.replace(words.strip(), "", 1)


def trim_end(text: str, closers: set[int]) -> int:
    r"""Return the length of a text without the spaces after the special token that ends it.

    Args:
        closers: the positions where special tokens end; if none does there, spaces count.

    >>> trim_end("yes<end>\n", {8})
    8
    """
    stripped_end = len(text.rstrip())
    return stripped_end if stripped_end in closers else len(text)
