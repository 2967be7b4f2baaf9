"""Tool calls between tags, as the families of models write them. See `forge.envs.calls`, which uses these."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

Schema = Mapping[str, Any]
Found = tuple[str, list[tuple[str, Any]], list[str]]  # the text without calls, (name, arguments) of each, errors

_DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", re.compile("<｜tool▁calls▁(?:begin|end)｜>"))
_XML = ("<tool_call>", "</tool_call>", re.compile(r"(?!)"))
_MISTRAL, _NAMED = "[TOOL_CALLS]", "[ARGS]"
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*?)(?:</function>\s*)?\Z", re.DOTALL)
_MESSAGE = re.compile(r"([^<]*(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?)<\|message\|>(.*)\Z", re.DOTALL)


def deepseek(text: str, tools: Mapping[str, Schema]) -> Found:
    """`begin function sep name, JSON in a code block, end` of V3 and R1, or `begin name sep JSON end` of V3.1."""

    def read(inner: str) -> tuple[str, Any]:
        kind, _, rest = inner.partition("<｜tool▁sep｜>")
        name, fence, code = rest.partition("\n```json\n")
        return (name.strip(), code.rpartition("```")[0]) if fence else (kind.strip(), rest)

    return _between(text, *_DEEPSEEK, read)


def glm(text: str, tools: Mapping[str, Schema]) -> Found:
    """`<tool_call>name <arg_key>a</arg_key> <arg_value>1</arg_value> ... </tool_call>`"""

    def read(inner: str) -> tuple[str, Any]:
        name = inner.partition("<arg_key>")[0].strip()
        return name, _typed(_pairs(inner, "<arg_key>", "</arg_key>", "</arg_value>"), tools.get(name, {}))

    return _between(text, *_XML, read)


def qwen_xml(text: str, tools: Mapping[str, Schema]) -> Found:
    """`<tool_call><function=name><parameter=a>1</parameter> ... </function></tool_call>`"""

    def read(inner: str) -> tuple[str, Any]:
        if (found := _FUNCTION.match(inner)) is None:
            raise ValueError("it must hold <function=name> ... </function>")
        name = found[1].strip()
        pairs = _pairs(found[2], "<parameter=", ">", "</parameter>")
        return name, _typed(
            [(key, value.removeprefix("\n").removesuffix("\n")) for key, value in pairs], tools.get(name, {})
        )

    return _between(text, *_XML, read)


def mistral(text: str, tools: Mapping[str, Schema]) -> Found:
    """`[TOOL_CALLS]` and a JSON list of calls, or `[TOOL_CALLS]name[ARGS]{...}` for each."""
    content, *parts = text.split(_MISTRAL)
    calls: list[tuple[str, Any]] = []
    errors: list[str] = []
    for part in parts:
        name, named, arguments = part.partition(_NAMED)
        try:
            listed = [{"name": name.strip(), "arguments": json.loads(arguments)}] if named else json.loads(part)
            for call in listed if isinstance(listed, list) else [listed]:
                if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                    raise ValueError('it must be a list of objects with a "name"')
                calls.append((call["name"], call.get("arguments", {})))
        except (ValueError, RecursionError) as error:
            errors.append(f"a call cannot be read: {error}")
    return content, calls, errors


def harmony(text: str, tools: Mapping[str, Schema]) -> Found:
    """Messages of gpt-oss: `<|channel|>analysis<|message|>` holds thoughts, which are returned between tags as other
    models write them, `to=functions.name` calls."""
    thoughts, said = [], []
    calls: list[tuple[str, Any]] = []
    errors: list[str] = []
    for part in re.split(r"<\|start\|>assistant|<\|end\|>|<\|call\|>|<\|return\|>", text):
        if not part.strip():
            continue
        if (found := _MESSAGE.match(part)) is None:
            said.append(part)
            continue
        header, body = found[1], found[2]
        recipient = re.search(r"to=(\S+?)(?=<|\s|\Z)", header)
        if recipient is not None:
            calls.append((recipient[1].removeprefix("functions."), body))
        elif "<|channel|>analysis" in header:
            thoughts.append(body)
        else:
            said.append(body)
    thought = f"<think>\n{chr(10).join(thoughts)}\n</think>\n\n" if thoughts else ""
    return thought + "".join(said), calls, errors


def _between(text: str, begin: str, end: str, frame: re.Pattern[str], read: Callable[[str], tuple[str, Any]]) -> Found:
    """The calls between two tags; `frame`: what else belongs to them."""
    content, *parts = text.split(begin)
    left = [content]
    calls: list[tuple[str, Any]] = []
    errors: list[str] = []
    for part in parts:
        inner, closed, after = part.partition(end)
        if not closed:
            errors.append(f"a call is not closed by {end}")
            continue
        left.append(after)
        try:
            calls.append(read(inner))
        except ValueError as error:
            errors.append(f"a call cannot be read: {error}")
    return frame.sub("", "".join(left)), calls, errors


def _pairs(text: str, begin: str, middle: str, end: str) -> list[tuple[str, str]]:
    """The names and values between tags. ValueError: one is not closed."""
    pairs, at = [], text.find(begin)
    while at >= 0:
        cut, last = text.find(middle, at), text.find(end, at)
        if not 0 <= cut < last:
            raise ValueError(f"an argument is not closed by {end}")
        value = text[cut + len(middle) : last].lstrip() if middle != ">" else text[cut + 1 : last]
        pairs.append((text[at + len(begin) : cut], value.removeprefix("<arg_value>")))
        at = text.find(begin, last)
    return pairs


def _typed(pairs: list[tuple[str, str]], function: Schema) -> dict[str, Any]:
    """Arguments of text in the types of their parameters: what is no string is JSON, where it can be read as that."""
    properties = function.get("parameters", {}).get("properties", {})
    values: dict[str, Any] = {}
    for name, text in pairs:
        name = name.strip()
        values[name] = text
        if properties.get(name, {}).get("type") != "string":
            with suppress(ValueError, RecursionError):
                values[name] = json.loads(text)
    return values
