"""Parsers of tool calls in the markup of each family of models, for `forge_envs.calls`.

A closing tag within a value must not end the call. In JSON, the parser finds the end. A value in XML ends at the first
closing tag that is followed by another tag of the call.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from .schemas import Schema, parameters_of

Call = str | tuple[str, Any]  # the JSON text of a call, or its name and arguments
Found = tuple[str, list[Call], list[str]]  # the text without calls, the calls, and errors of malformed calls

MAX_CALLS = 64  # calls of one turn
MAX_CHARACTERS = 1 << 16  # characters of one call
_BEGIN, _END = "<tool_call>", "</tool_call>"
_FRAME = re.compile("<｜tool▁calls▁(?:begin|end)｜>")
_MISTRAL = "[TOOL_CALLS]"
_NAMED = re.compile(r"([^\[{]*)(?:\[CALL_ID\][^\[{]*)?\[ARGS\]")
_HEADER = re.compile(r"[^<]*(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?<\|message\|>")
_CLOSED = re.compile(r"<\|start\|>assistant|<\|end\|>|<\|call\|>|<\|return\|>")
# Of Gemma 4: a call up to its closing tag, which may stand in a text, and a key without quotes.
_GEMMA_CALL = re.compile(r'(?:<\|"\|>.*?(?:<\|"\|>|\Z)|(?!<\|?tool_call).)*', re.DOTALL)
_GEMMA_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:]+)\s*:")
_DECODER = json.JSONDecoder()
_SPACES = re.compile(r"\s*")


class Tags(NamedTuple):
    """The tags with which a family of models writes calls in XML."""

    name: re.Pattern[str]  # the start of a call; its group is the tool's name
    key: re.Pattern[str]  # the tag before a value; its group is the argument's name
    closing: str  # the tag after a value
    follows: re.Pattern[str]  # what must come after the closing tag
    margin: str  # what the model writes before and after a value, which is not a part of it
    python: bool  # whether values other than texts are Python literals, not JSON


QWEN = Tags(
    name=re.compile(r"\s*<function=([^>\n]*)>"),
    key=re.compile(r"<parameter=([^>\n]*)>"),
    closing="</parameter>",
    follows=re.compile(r"\s*(?:<parameter=|(?:</function>\s*)?</tool_call>)"),
    margin="\n",
    python=True,
)
GLM = Tags(
    name=re.compile(r"([^<]*)"),
    key=re.compile(r"<arg_key>([^<]*)</arg_key>\s*(?:<arg_value>)?"),
    closing="</arg_value>",
    follows=re.compile(r"\s*(?:<arg_key>|</tool_call>)"),
    margin="",
    python=False,
)


def read_hermes(text: str, tools: Mapping[str, Schema]) -> Found:
    """Parse calls like `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""
    return read_between(text, _BEGIN, _END, _json_body)


def read_deepseek(text: str, tools: Mapping[str, Schema]) -> Found:
    """Parse calls of DeepSeek's models, between the tags that are written `begin` and `end` here.

    V3 and R1 write `begin function sep NAME`, JSON in a code block and `end`; V3.1 writes `begin NAME sep JSON end`.
    """

    def read_call(text: str, start: int, begin: str, end: str) -> tuple[Call, int]:
        call_text, position = _json_body(text, start, begin, end)
        before, _, after = call_text.partition("<｜tool▁sep｜>")
        name, fence, code = after.partition("\n```json\n")
        if fence:
            return (name.strip(), code.rpartition("```")[0]), position
        return (before.strip(), after), position

    content, calls, errors = read_between(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", read_call)
    return _FRAME.sub("", content), calls, errors


def read_gemma(text: str, tools: Mapping[str, Schema]) -> Found:
    """Parse calls of Gemma 4, like `<|tool_call>call:add{a:1,b:<|"|>two<|"|>}<tool_call|>`."""

    def read_call(text: str, start: int, begin: str, end: str) -> tuple[Call, int]:
        match = _GEMMA_CALL.match(text, start, start + MAX_CHARACTERS)
        name, brace, values = ("" if match is None else match[0]).partition("{")
        parts = (brace + values).split('<|"|>')
        parts[::2] = [_GEMMA_KEY.sub(r'\1"\2":', part) for part in parts[::2]]
        parts[1::2] = map(json.dumps, parts[1::2])
        position = start + len(name + brace + values)
        if position < len(text) and not text.startswith(end, position):  # the tag may end the turn
            raise ValueError(f"it is not closed by {end}")
        return (name.strip().removeprefix("call:"), json.loads("".join(parts))), position + len(end)

    thoughts, thoughts_end, answer_text = text.rpartition("<channel|>")
    content, calls, errors = read_between(answer_text, "<|tool_call>", "<tool_call|>", read_call)
    return thoughts + thoughts_end + content, calls, errors


def read_mistral(text: str, tools: Mapping[str, Schema]) -> Found:
    """Parse calls like `[TOOL_CALLS][{"name": ...}, ...]`, a JSON list, or `[TOOL_CALLS]name[ARGS]{...}` for each."""
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
            if header is not None:
                calls.append((header[1].strip(), value))
            else:
                calls += map(json.dumps, value if isinstance(value, list) else [value])
        except (ValueError, RecursionError) as error:
            errors.append(f"a call cannot be read: {error}")

    return content, calls, errors


def read_harmony(text: str, tools: Mapping[str, Schema]) -> Found:
    """Parse a turn of gpt-oss, which is a sequence of messages, each with a header before `<|message|>`.

    A header with `to=functions.NAME` makes the message a call, and `<|channel|>analysis` a thought. Thoughts are
    returned at the beginning of the text between <think> tags, as other models write them.
    """
    thoughts, messages = [], []
    calls: list[Call] = []
    errors: list[str] = []
    position = 0

    while position < len(text):
        # A message ends at a mark, or where the next one starts. In the JSON of a call, marks are part of its text.
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
    """Parse all calls between two tags.

    A malformed call is an error, and ends at its closing tag or at the next opening tag, whichever comes first.

    Args:
        begin, end: the tags.
        read: returns the call whose text starts at a position, and the position after its closing tag. Its arguments
            are the text, the position, and the tags. It raises ValueError for a malformed call.
    """
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
        except (ValueError, RecursionError) as error:
            errors.append(f"a call cannot be read: {error}")
            stop, following = _find_mark(text, end, start), _find_mark(text, begin, start)
            position = following if following < stop else min(stop + len(end), len(text))

    return "".join([*outside, text[position:start]]), calls, errors


def _json_body(text: str, start: int, begin: str, end: str) -> tuple[str, int]:
    """Return the text of a call that contains JSON, and the position after its closing tag.

    Raises:
        ValueError: the call is not closed before the next one.
    """
    stop, following = _find_mark(text, end, start), _find_mark(text, begin, start)
    # Tags within the JSON do not count: search again after its end.
    bracket = text.find("{", start, min(stop, following))
    if bracket >= 0:
        json_end = _json_end(text, bracket)
        stop, following = _find_mark(text, end, json_end), _find_mark(text, begin, json_end)
    if following < stop or stop == len(text):
        raise ValueError(f"it is not closed by {end}")
    return text[start:stop], stop + len(end)


def _read_xml(tags: Tags, text: str, tools: Mapping[str, Schema]) -> Found:
    # Parse the calls of a turn in XML; the schemas of the tools decide which values are texts.

    def read_call(text: str, start: int, begin: str, end: str) -> tuple[Call, int]:
        name, pairs, position = _read_call(text, start, tags)
        parameters = parameters_of(tools.get(name, {}))
        arguments = {key: parameters.value(key, value, python=tags.python) for key, value in pairs}
        return (name, arguments), position

    return read_between(text, _BEGIN, _END, read_call)


# Parses calls like `<tool_call>name <arg_key>a</arg_key> <arg_value>1</arg_value> ... </tool_call>`.
read_glm = partial(_read_xml, GLM)
# Parses calls like `<tool_call><function=name><parameter=a>1</parameter> ... </function></tool_call>`.
qwen_xml = partial(_read_xml, QWEN)


def _read_call(text: str, start: int, tags: Tags) -> tuple[str, list[tuple[str, str]], int]:
    """Return the tool's name of a call in XML, its arguments as pairs of texts, and the position after its closing tag.

    Args:
        start: the position after the opening tag.

    Raises:
        ValueError: the call has no name, or the call or an argument is not closed.
    """
    if (name := tags.name.match(text, start)) is None:
        raise ValueError("it must hold <function=name> ... </function>")
    pairs: list[tuple[str, str]] = []
    position = name.end()

    while True:
        # The next argument must start before this call ends and before the next call starts.
        end, following = _find_mark(text, _END, position), _find_mark(text, _BEGIN, position)
        key = tags.key.search(text, position, min(end, following))
        skipped = text[position : min(end, following) if key is None else key.start()].strip()
        if key is None or skipped:
            break
        position = _value_end(text, key.end(), start + MAX_CHARACTERS, tags)
        value = text[key.end() : position].removeprefix(tags.margin).removesuffix(tags.margin)
        pairs.append((key[1].strip(), value))
        position += len(tags.closing)

    if end == len(text) or following < end:
        raise ValueError(f"it is not closed by {_END}")
    if skipped and (key is not None or skipped != "</function>"):
        raise ValueError(f"{skipped[:40]!r} is not an argument")
    return name[1].strip(), pairs, end + len(_END)


def _value_end(text: str, start: int, limit: int, tags: Tags) -> int:
    """Return the position of the first closing tag of a value that another tag of the call follows.

    Args:
        start: the position of the value.
        limit: the position up to which tags are searched.

    Raises:
        ValueError: no tag closes it before the next call.
    """
    for tag in re.compile(tags.closing).finditer(text, start, limit):
        if tags.follows.match(text, tag.end()):
            if _BEGIN not in text[start : tag.start()]:
                return tag.start()
            break
    raise ValueError(f"an argument is not closed by {tags.closing}")


def _find_mark(text: str, mark: str, start: int) -> int:
    """Return the position of the next mark from `start` on; the length of the text if there is none."""
    position = text.find(mark, start)
    return len(text) if position < 0 else position


def _json_end(text: str, start: int) -> int:
    """Return the position after the JSON value at `start`, or after spaces there; `start` if there is no JSON."""
    spaces = _SPACES.match(text, start)
    try:
        return _DECODER.raw_decode(text, start if spaces is None else spaces.end())[1]
    except (ValueError, RecursionError):
        return start
