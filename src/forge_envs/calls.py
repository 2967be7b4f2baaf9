"""Parsing of tool calls in the syntaxes of the families of models.

Parsing raises no errors: malformed calls become `Action.errors`. In thoughts, which end with `</think>`, calls are not
parsed. The syntaxes are:

- "hermes" (Qwen, Hermes): `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`
- "llama3": the whole answer is `{"name": "add", "parameters": {"a": 1}}`, several of them separated by `;`
- "plain": `add(a=1, b=2)` anywhere in the text; of a tool with one parameter also `search(any text)`
- "mistral", "deepseek", "harmony" (gpt-oss), "glm" (GLM 4.5 and later), "qwen_xml" (Qwen3-Coder), "gemma"
  (Gemma 4): see `forge_envs.markup`
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from . import markup
from .environment import Action, ToolCall
from .markup import MAX_CALLS, MAX_CHARACTERS
from .schemas import Schema, parameters_of

# Python warns of unusual syntax when it parses calls, such as an invalid escape: turns of a policy could fill the log.
warnings.filterwarnings("ignore", module="<model output>")

Syntax = Literal["hermes", "llama3", "plain", "mistral", "deepseek", "harmony", "glm", "qwen_xml", "gemma"]
SYNTAXES: tuple[str, ...] = get_args(Syntax)


def check_syntax(name: str) -> None:
    """Raise ValueError unless a name is one of SYNTAXES."""
    if name not in SYNTAXES:
        raise ValueError(f"syntax must be one of {', '.join(SYNTAXES)}, got {name!r}")


_PYTHON_TAG = "<|python_tag|>"
# Texts by which the syntax of a chat template is recognised: the first one that it contains decides.
_SIGNS: dict[str, Syntax] = {
    **{"<|tool_call>": "gemma", "<|channel|>": "harmony", "<arg_key>": "glm", "<function=": "qwen_xml"},
    **{"<tool_call>": "hermes", "tool▁call": "deepseek", "[TOOL_CALLS]": "mistral"},
    **{"ipython": "llama3", "python_tag": "llama3"},
}


def read_action(text: str, syntax: Syntax, tools: Sequence[Schema] = (), *, truncated: bool = False) -> Action:
    """Parse the text of a turn into an action with its tool calls.

    Args:
        text: the turn without the token that ends it.
        tools: schemas of the available tools in OpenAI's format; without tools no text is parsed as a call.
        truncated: whether the turn was cut at its limit of tokens.

    >>> tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}}}}}
    >>> read_action("Sum: add(a=1)", "plain", [tool]).calls
    (ToolCall(name='add', arguments={'a': 1}, id='call_0'),)
    """
    schemas = {tool["function"]["name"]: tool["function"] for tool in tools}
    if not tools and syntax != "harmony":
        return Action(text, text.strip(), truncated=truncated)
    content, calls, errors = _read_by_syntax(text, syntax, schemas)
    if not tools:
        # The thoughts of "harmony" are messages, which the parser recognises itself: it is parsed for them only.
        calls, errors = [], []
    elif syntax != "harmony":
        thought, closing, answer = text.partition("</think>")
        # Parse the text after the thoughts only, unless the tag is within the arguments of a call.
        is_in_arguments = (
            not errors and closing not in content and any(closing in str(call.arguments) for call in calls)
        )
        if closing and not is_in_arguments:
            content, calls, errors = _read_by_syntax(answer, syntax, schemas)
            content = thought + closing + content

    if len(calls) > MAX_CALLS:
        errors.append(f"more than {MAX_CALLS} calls in one turn: the rest was left out")
    with_ids = [
        ToolCall(call.name, call.arguments, call.id or f"call_{number}")
        for number, call in enumerate(calls[:MAX_CALLS])
    ]
    return Action(text, content.strip(), tuple(with_ids), tuple(errors), truncated)


def syntax_of(template: str) -> Syntax:
    """Return the syntax of tool calls in a chat template, "plain" if it is not recognised.

    >>> syntax_of("{{ '<tool_call>' }}")
    'hermes'
    """
    return next((name for sign, name in _SIGNS.items() if sign in template), "plain")


def _read_by_syntax(text: str, syntax: str, tools: Mapping[str, Schema]) -> tuple[str, list[ToolCall], list[str]]:
    # Return the text without calls, at most MAX_CALLS + 1 calls, and the errors of malformed ones.
    content, raw_calls, errors = _READERS[syntax](text, tools)
    calls: list[ToolCall] = []
    for call in raw_calls[: MAX_CALLS + 1]:
        try:
            calls.append(_tool_call(call))
        except (ValueError, RecursionError) as error:
            errors.append(f"a call cannot be read: {error}")
    return content, calls, errors


def _read_llama3(text: str, tools: Mapping[str, Schema]) -> markup.Found:
    # Parse a turn that consists of JSON objects, or starts with the tag; any other turn has no calls.
    remaining = text.strip()
    has_tag = remaining.startswith(_PYTHON_TAG)
    remaining = remaining.removeprefix(_PYTHON_TAG).strip()
    if not has_tag and not remaining.startswith("{"):
        return text, [], []
    calls: list[markup.Call] = []
    decoder = json.JSONDecoder()

    # Models separate several objects by different characters.
    while remaining and len(calls) <= MAX_CALLS:
        try:
            _, end = decoder.raw_decode(remaining)
        except (ValueError, RecursionError):
            end = len(remaining)
        calls.append(remaining[:end])
        remaining = remaining[end:].lstrip(" \n\t;,")

    return "", calls, []


_BRACKET = re.compile(r"[()]")
_LIST_MARKS = re.compile(r"<\|tool_call_start\|>\s*\[[\s,]*\]\s*<\|tool_call_end\|>")  # of LFM, around its calls
# One bracket, or a text in single or double quotes, in which brackets do not count: the quote, characters other than it
# and backslashes, escaped characters with such characters after them, and the quote again or the end of the text. The
# possessive quantifiers (*+) keep the time linear.
_QUOTED = re.compile("|".join(["[()]", *(rf"{q}[^{q}\\]*+(?:\\.[^{q}\\]*+)*+(?:{q}|\\?\Z)" for q in "'\"")]), re.DOTALL)


def _read_plain(text: str, tools: Mapping[str, Schema]) -> markup.Found:
    # Parse calls of the tools like `add(a=1, b=2)` anywhere in a text.
    calls: list[markup.Call] = []
    errors: list[str] = []
    outside, position = [], 0

    # Longer names first: a regular expression takes the first alternative that matches.
    names = "|".join(sorted(map(re.escape, tools), key=len, reverse=True))
    for match in re.finditer(rf"(?<![\w.])({names})\(", text):
        is_in_arguments = match.start() < position  # of the call before it
        if is_in_arguments or len(calls) + len(errors) > MAX_CALLS:
            continue
        name, start = match[1], match.end()
        outside.append(text[position : match.start()])
        # An unpaired apostrophe is taken for a quote that does not close: then brackets count everywhere.
        end = _find_closing(text, start, _QUOTED) or _find_closing(text, start, _BRACKET)
        if not end:
            errors.append(f"the call of {name} is not closed by )")
            position = len(text)
            break

        position = end
        try:
            calls.append((name, _read_arguments(text[start : end - 1], tools[name])))
        except ValueError as error:
            errors.append(f"the call of {name} cannot be read: {error}")

    return _LIST_MARKS.sub("", "".join([*outside, text[position:]])), calls, errors


def _find_closing(text: str, start: int, tokens: re.Pattern[str]) -> int:
    """Return the position after the bracket that closes the one before `start`; 0 if none does within MAX_CHARACTERS.

    Args:
        tokens: matches brackets, and texts in which they do not count.
    """
    depth = 1
    for token in tokens.finditer(text, start, start + MAX_CHARACTERS):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if not depth:
            return token.end()
    return 0


def _read_arguments(text: str, function: Schema) -> dict[str, Any]:
    """Return the arguments between the brackets of a call, by name.

    They are written as Python's keyword or positional arguments. A function with one parameter may also be called with
    a text without quotes: `search(any text)`.

    Raises:
        ValueError: they are neither.
    """
    parameters = parameters_of(function)
    names = list(parameters.properties)
    only_name = names[0] if len(names) == 1 else ""
    unquoted = {only_name: re.sub(rf"^\s*{re.escape(only_name)}\s*=\s*", "", text)}

    try:
        # Literals only: no code of the policy is executed.
        call = _parse_call(text)
        values = {
            **{names[n]: ast.literal_eval(value) for n, value in enumerate(call.args)},
            **{str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords},
        }
    except (ValueError, SyntaxError, TypeError, IndexError, MemoryError, RecursionError, AttributeError) as error:
        if only_name:
            return unquoted
        raise ValueError(
            f"the call's arguments must be written as {', '.join(f'{name}=...' for name in names) or '()'}"
        ) from error

    # The literal is not the value where only its text has the right type: 12 for a parameter that is a text.
    if only_name in values and not parameters.takes(only_name, values[only_name]):
        return unquoted if parameters.takes(only_name, unquoted[only_name]) else values
    return values


def _parse_call(arguments: str) -> Any:
    """Return the syntax tree of a call with these arguments, whose texts may have line breaks, as LFM writes them."""
    try:
        return ast.parse(f"f({arguments})", "<model output>", mode="eval").body
    except SyntaxError:
        escaped = _QUOTED.sub(lambda text: text[0].replace("\r", "\\r").replace("\n", "\\n"), arguments)
        return ast.parse(f"f({escaped})", "<model output>", mode="eval").body


def _tool_call(call: markup.Call) -> ToolCall:
    """Return a call of a parser as a `ToolCall`; ValueError if it has no name, or its arguments are not an object."""
    if isinstance(call, str):
        if len(call) > MAX_CHARACTERS:
            raise ValueError(f"the tool call has more than {MAX_CHARACTERS} characters")
        call_object = json.loads(call)
        if not isinstance(call_object, dict) or not isinstance(call_object.get("name"), str):
            raise ValueError('the tool call must be an object with a "name"')
        # Families of models use different keys for the arguments.
        call = call_object["name"], call_object.get("arguments", call_object.get("parameters"))

    name, arguments = call
    # Some models write the arguments as JSON text within the JSON of the call, as OpenAI's API does.
    arguments = {} if arguments in (None, "") else arguments
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of the tool call must be an object")
    if not name:
        raise ValueError("the tool call has no name")

    return ToolCall(name, arguments)


_READERS: dict[str, Callable[[str, Mapping[str, Schema]], markup.Found]] = {
    **{"hermes": markup.read_hermes, "llama3": _read_llama3, "plain": _read_plain, "mistral": markup.read_mistral},
    **{
        "deepseek": markup.read_deepseek,
        "harmony": markup.read_harmony,
        "glm": markup.read_glm,
        "qwen_xml": markup.qwen_xml,
        "gemma": markup.read_gemma,
    },
}
