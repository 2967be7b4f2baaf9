"""Tool calls between tags, as the families of models write them. See `forge_envs.calls`, which uses these.

A delimiter within a value does not end a call. JSON says itself where it ends. The text of a value in XML ends at the
first closing tag that another tag of the call follows, that is not within quotes, and that closes no tag of the text.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .schemas import Schema, parameters_of

Call = str | tuple[str, Any]  # a call in JSON, or its name and arguments
Found = tuple[str, list[Call], list[str]]  # the text without calls, the calls, errors

MAX_CALLS = 64  # calls of one turn
MAX_CHARACTERS = 1 << 16  # characters of one call
_SCANNED = 100  # tags after the first that may close a value, within which a better one is searched
_BEGIN, _END = "<tool_call>", "</tool_call>"
_FRAME = re.compile("<｜tool▁calls▁(?:begin|end)｜>")
_MISTRAL = "[TOOL_CALLS]"
_NAMED = re.compile(r"([^\[{]*)(?:\[CALL_ID\][^\[{]*)?\[ARGS\]")
_HEADER = re.compile(r"[^<]*(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?<\|message\|>")
_CLOSED = re.compile(r"<\|start\|>assistant|<\|end\|>|<\|call\|>|<\|return\|>")
_DECODER = json.JSONDecoder()
_SPACES = re.compile(r"\s*")


class Tags(NamedTuple):
    """The tags with which a family writes calls in XML."""

    name: re.Pattern[str]
    key: re.Pattern[str]  # before a value; its group is the argument's name
    opening: str  # of a value
    closing: str
    follows: re.Pattern[str]  # what comes after a value
    margin: str  # around a value
    python: bool  # whether values that are no text are written as Python writes them


QWEN = Tags(
    name=re.compile(r"\s*<function=([^>\n]*)>"),
    key=re.compile(r"<parameter=([^>\n]*)>"),
    opening="<parameter=",
    closing="</parameter>",
    follows=re.compile(r"\s*(?:<parameter=|(?:</function>\s*)?</tool_call>)"),
    margin="\n",
    python=True,
)
GLM = Tags(
    name=re.compile(r"([^<]*)"),
    key=re.compile(r"<arg_key>([^<]*)</arg_key>\s*(?:<arg_value>)?"),
    opening="<arg_value>",
    closing="</arg_value>",
    follows=re.compile(r"\s*(?:<arg_key>|</tool_call>)"),
    margin="",
    python=False,
)


def read_hermes(text: str, tools: Mapping[str, Schema]) -> Found:
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`"""
    return read_between(text, _BEGIN, _END, _json_body)


def read_deepseek(text: str, tools: Mapping[str, Schema]) -> Found:
    """`start function sep name, JSON in a code block, end` of V3 and R1, or `start name sep JSON end` of V3.1."""

    def read_call(text: str, start: int, begin: str, end: str) -> tuple[Call, int]:
        part, position = _json_body(text, start, begin, end)
        kind, _, body = part.partition("<｜tool▁sep｜>")
        name, fence, code = body.partition("\n```json\n")
        return ((name.strip(), code.rpartition("```")[0]) if fence else (kind.strip(), body)), position

    content, calls, errors = read_between(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", read_call)
    return _FRAME.sub("", content), calls, errors


def read_glm(text: str, tools: Mapping[str, Schema]) -> Found:
    """`<tool_call>name <arg_key>a</arg_key> <arg_value>1</arg_value> ... </tool_call>`"""
    return _read_xml(text, tools, GLM)


def qwen_xml(text: str, tools: Mapping[str, Schema]) -> Found:
    """`<tool_call><function=name><parameter=a>1</parameter> ... </function></tool_call>`"""
    return _read_xml(text, tools, QWEN)


def read_mistral(text: str, tools: Mapping[str, Schema]) -> Found:
    """`[TOOL_CALLS]` and a JSON list of calls, or `[TOOL_CALLS]name[ARGS]{...}` for each."""
    # A list of calls after one mark, or a mark before each call.
    content, _, _ = text.partition(_MISTRAL)
    calls: list[Call] = []
    errors: list[str] = []
    position = len(content)

    while 0 <= position < len(text) and len(calls) + len(errors) <= MAX_CALLS:
        header = _NAMED.match(text, position + len(_MISTRAL))
        start = position + len(_MISTRAL) if header is None else header.end()
        position = text.find(_MISTRAL, _json_end(text, start))
        try:
            value = json.loads(text[start : None if position < 0 else position])
            listed = value if isinstance(value, list) and header is None else [value]
            calls += map(json.dumps, listed) if header is None else [(header[1].strip(), value)]
        except (ValueError, RecursionError) as error:
            errors.append(f"a call cannot be read: {error}")

    return content, calls, errors


def read_harmony(text: str, tools: Mapping[str, Schema]) -> Found:
    """Messages of gpt-oss: `<|channel|>analysis<|message|>` holds thoughts, which are returned between tags as other
    models write them, `to=functions.name` calls."""
    thoughts, messages = [], []
    calls: list[Call] = []
    errors: list[str] = []
    position = 0

    while position < len(text):
        # A message has a header with channel and recipient, and ends at a mark, or where the next one starts.
        header = _HEADER.match(text, position)
        start = position if header is None else header.end()
        recipient = None if header is None else re.search(r"to=(\S+?)(?=<|\s)", header[0])
        closed = _CLOSED.search(text, start if recipient is None else _json_end(text, start))
        body = text[start : None if closed is None else closed.start()]
        position = len(text) if closed is None else closed.end()

        if recipient is not None:
            calls.append((recipient[1].removeprefix("functions."), body))
        elif header is not None and "<|channel|>analysis" in header[0]:
            thoughts.append(body)
        elif header is not None or body.strip():
            messages.append(body)

    thought = f"<think>\n{chr(10).join(thoughts)}\n</think>\n\n" if thoughts else ""
    return thought + "".join(messages), calls, errors


def read_between(text: str, begin: str, end: str, read: Callable[[str, int, str, str], tuple[Call, int]]) -> Found:
    """Return the text without calls, what `read` makes of each call between two tags, with the position behind it, and
    errors. A malformed call ends where its end or the next one's beginning is."""
    outside: list[str] = []
    calls: list[Call] = []
    errors: list[str] = []
    position = 0

    while (start := _find_mark(text, begin, position)) < len(text) and len(calls) + len(errors) <= MAX_CALLS:
        outside.append(text[position:start])
        start += len(begin)
        try:
            call, position = read(text, start, begin, end)
            calls.append(call)
        except ValueError as error:
            errors.append(f"a call cannot be read: {error}")
            stop, following = _find_mark(text, end, start), _find_mark(text, begin, start)
            position = following if following < stop else min(stop + len(end), len(text))

    return "".join([*outside, text[position:start]]), calls, errors


def _json_body(text: str, start: int, begin: str, end: str) -> tuple[str, int]:
    """Return the text of a call whose arguments are JSON, and the position behind its end. ValueError: it is not
    closed."""
    stop, following = _find_mark(text, end, start), _find_mark(text, begin, start)
    # Marks within JSON arguments do not end the call.
    bracket = text.find("{", start, min(stop, following))
    if bracket >= 0:
        past = _json_end(text, bracket)
        stop, following = _find_mark(text, end, past), _find_mark(text, begin, past)
    if following < stop or stop == len(text):
        raise ValueError(f"it is not closed by {end}")
    return text[start:stop], stop + len(end)


def _read_xml(text: str, tools: Mapping[str, Schema], tags: Tags) -> Found:
    def read_call(text: str, start: int, begin: str, end: str) -> tuple[Call, int]:
        name, pairs, position = _read_call(text, start, tags)
        parameters = parameters_of(tools.get(name, {}))
        return (name, {key: parameters.value(key, value, python=tags.python) for key, value in pairs}), position

    return read_between(text, _BEGIN, _END, read_call)


def _read_call(text: str, start: int, tags: Tags) -> tuple[str, list[tuple[str, str]], int]:
    """Return the name and arguments of the call whose text starts at `start`, and where it ends. ValueError: it has no
    name, or something is not closed."""
    if (name := tags.name.match(text, start)) is None:
        raise ValueError("it must hold <function=name> ... </function>")
    pairs: list[tuple[str, str]] = []
    position = name.end()

    while True:
        # Arguments up to the end of this call, or the beginning of the next one.
        end, following = _find_mark(text, _END, position), _find_mark(text, _BEGIN, position)
        key = tags.key.search(text, position, min(end, following))
        if key is None:
            break
        position = _value_end(text, key.end(), start + MAX_CHARACTERS, tags)
        value = text[key.end() : position].removeprefix(tags.margin).removesuffix(tags.margin)
        pairs.append((key[1].strip(), value))
        position += len(tags.closing)

    if end == len(text) or following < end:
        raise ValueError(f"it is not closed by {_END}")
    if tags.opening in text[position:end]:
        raise ValueError(f"{tags.opening} does not start an argument there")
    return name[1].strip(), pairs, end + len(_END)


def _value_end(text: str, start: int, limit: int, tags: Tags) -> int:
    """Return the position of the tag that closes the value from `start` on. ValueError: there is none."""
    # JSON says itself where it ends.
    past = _SPACES.match(text, _json_end(text, start))
    assert past is not None
    if text.startswith(tags.closing, past.end()) and tags.follows.match(text, past.end() + len(tags.closing)):
        return past.end()
    first, open_tags, scanned = -1, 0, 0

    # An opening tag is on a separate line or after another tag, as templates write it, or it is only spoken of.
    for tag in re.compile(f"(?<=[\n>]){tags.opening}|{tags.closing}").finditer(text, start, limit):
        if tag[0] == tags.opening:
            open_tags += 1
            continue
        after = tags.follows.match(text, tag.end())
        first = tag.start() if first < 0 and after is not None else first
        if open_tags:
            open_tags -= 1
        elif after is not None and not _is_quoted(text[start : tag.start()], text[after.end() : limit]):
            return tag.start()

        scanned += first >= 0
        if scanned > _SCANNED:
            break

    if first < 0 or _BEGIN in text[start:first]:
        raise ValueError(f"an argument is not closed by {tags.closing}")
    return first


def _is_quoted(before: str, following: str) -> bool:
    """Return whether quotes that are open before a tag close after it: on its line, or anywhere if there are three of
    them."""
    if any(before.count(quotes) % 2 and quotes in following for quotes in ('"""', "'''", "```")):
        return True
    # Quotes of one line, other than three of them, do not reach beyond it.
    line, following = before.rpartition("\n")[2], following.partition("\n")[0]
    return any(line.count(quote) % 2 and quote in following for quote in "\"'`")


def _find_mark(text: str, mark: str, start: int) -> int:
    """Return the position of a mark; the end of the text if there is none."""
    position = text.find(mark, start)
    return len(text) if position < 0 else position


def _json_end(text: str, start: int) -> int:
    """Return the end of the JSON that starts at `start`, after spaces; `start` if there is none."""
    spaces = _SPACES.match(text, start)
    try:
        return _DECODER.raw_decode(text, start if spaces is None else spaces.end())[1]
    except (ValueError, RecursionError):
        return start
