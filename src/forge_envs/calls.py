"""Parse tool calls in the syntax of each family of models. Parsing never raises: malformed calls become
`Action.errors`. Thoughts, which end with `</think>`, hold no calls.

- "hermes" (Qwen, Hermes): `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`
- "llama3": the whole answer is `{"name": "add", "parameters": {"a": 1}}`, several of them separated by `;`
- "plain": `add(a=1, b=2)` anywhere in the text; of a tool with one parameter also `search(any text)`
- "mistral", "deepseek", "harmony" (gpt-oss), "glm" (GLM 4.5 and later), "qwen_xml" (Qwen3-Coder): see
  `forge_envs.markup`
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

# Python warns of odd syntax as it parses, once for each place: a turn could fill the log.
warnings.filterwarnings("ignore", module="<model output>")

Syntax = Literal["hermes", "llama3", "plain", "mistral", "deepseek", "harmony", "glm", "qwen_xml"]
SYNTAXES: tuple[str, ...] = get_args(Syntax)


def check_syntax(name: str) -> None:
    """Raise ValueError unless tool calls have a syntax of this name."""
    if name not in SYNTAXES:
        raise ValueError(f"syntax must be one of {', '.join(SYNTAXES)}, got {name!r}")


_PYTHON_TAG = "<|python_tag|>"
# What only the templates of a syntax hold, the more special ones first.
_SIGNS: dict[str, Syntax] = {
    **{"<|channel|>": "harmony", "<arg_key>": "glm", "<function=": "qwen_xml", "<tool_call>": "hermes"},
    **{"tool▁call": "deepseek", "[TOOL_CALLS]": "mistral", "ipython": "llama3", "python_tag": "llama3"},
}


def read_action(text: str, syntax: Syntax, tools: Sequence[Schema] = (), *, truncated: bool = False) -> Action:
    """Parse the text of a turn, without the token that ends it.

    Args:
        tools: schemas of the available tools in OpenAI's format; without tools nothing is a call.
    """
    schemas = {tool["function"]["name"]: tool["function"] for tool in tools}
    if syntax == "harmony":
        content, calls, errors = _read_by_syntax(text, syntax, schemas)  # its thoughts have another form
        calls, errors = (calls, errors) if tools else ([], [])
    elif not tools:
        return Action(text, text.strip(), truncated=truncated)
    else:
        content, calls, errors = _read_by_syntax(text, syntax, schemas)
        thought, closing, answer = text.partition("</think>")
        # The tag may be within an argument; else the calls before it are thoughts.
        in_arguments = not errors and closing not in content
        in_arguments = in_arguments and any(closing in str(call.arguments) for call in calls)
        if closing and not in_arguments:
            content, calls, errors = _read_by_syntax(answer, syntax, schemas)
            content = thought + closing + content

    if len(calls) > MAX_CALLS:
        errors.append(f"more than {MAX_CALLS} calls in one turn: the rest was left out")
    numbered = (ToolCall(call.name, call.arguments, call.id or f"call_{n}") for n, call in enumerate(calls[:MAX_CALLS]))
    return Action(text, content.strip(), tuple(numbered), tuple(errors), truncated)


def syntax_of(template: str) -> Syntax:
    """Return the syntax of a chat template's text.

    >>> syntax_of("{{ '<tool_call>' }}")
    'hermes'
    """
    return next((name for sign, name in _SIGNS.items() if sign in template), "plain")


def _read_by_syntax(text: str, syntax: str, tools: Mapping[str, Schema]) -> tuple[str, list[ToolCall], list[str]]:
    content, found, errors = _READERS[syntax](text, tools)
    calls: list[ToolCall] = []
    for call in found[: MAX_CALLS + 1]:
        try:
            calls.append(_tool_call(call))
        except (ValueError, RecursionError) as error:
            errors.append(f"a call cannot be read: {error}")
    return content, calls, errors


def _read_llama3(text: str, tools: Mapping[str, Schema]) -> markup.Found:
    body = text.strip()
    tagged = body.startswith(_PYTHON_TAG)
    body = body.removeprefix(_PYTHON_TAG).strip()
    if not tagged and not body.startswith("{"):
        return text, [], []
    calls: list[markup.Call] = []
    decoder = json.JSONDecoder()

    # Objects one after the other, as the model separated them.
    while body and len(calls) <= MAX_CALLS:
        try:
            _, end = decoder.raw_decode(body)
        except (ValueError, RecursionError):
            end = len(body)
        calls.append(body[:end])
        body = body[end:].lstrip(" \n\t;,")

    return "", calls, []


# A text in quotes, or one bracket; a quote that does not close matches up to the end.
_BRACKET = re.compile(r"[()]")
_QUOTED = re.compile("|".join(["[()]", *(rf"{q}[^{q}\\]*+(?:\\.[^{q}\\]*+)*+(?:{q}|\\?\Z)" for q in "'\"")]), re.DOTALL)


def _read_plain(text: str, tools: Mapping[str, Schema]) -> markup.Found:
    calls: list[markup.Call] = []
    errors: list[str] = []
    outside, position = [], 0

    # Longer names first, so that a name is not read as the beginning of another.
    names = "|".join(sorted(map(re.escape, tools), key=len, reverse=True))
    for match in re.finditer(rf"(?<![\w.])({names})\(", text):
        if match.start() < position or len(calls) + len(errors) > MAX_CALLS:
            continue  # within the arguments of another
        name, start = match[1], match.end()
        outside.append(text[position : match.start()])
        end = _find_closing(text, start, _QUOTED) or _find_closing(
            text, start, _BRACKET
        )  # there may be an unpaired apostrophe
        if not end:
            errors.append(f"the call of {name} is not closed by )")
            position = len(text)
            break

        position = end
        try:
            calls.append((name, _read_arguments(text[start : end - 1], tools[name])))
        except ValueError as error:
            errors.append(f"the call of {name} cannot be read: {error}")

    return "".join([*outside, text[position:]]), calls, errors


def _find_closing(text: str, start: int, tokens: re.Pattern[str]) -> int:
    """Return the index after the bracket that closes one before `start`, within MAX_CHARACTERS; 0 if none does."""
    depth = 1
    for token in tokens.finditer(text, start, start + MAX_CHARACTERS):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if not depth:
            return token.end()
    return 0


def _read_arguments(text: str, function: Schema) -> dict[str, Any]:
    """Python keyword or positional arguments; of a function with one parameter also its bare text."""
    parameters = parameters_of(function)
    names = list(parameters.properties)
    only = names[0] if len(names) == 1 else ""
    bare = {only: re.sub(rf"^\s*{re.escape(only)}\s*=\s*", "", text)}

    try:
        # Literals only: nothing is evaluated.
        call: Any = ast.parse(f"f({text})", "<model output>", mode="eval").body
        values = {names[n]: ast.literal_eval(value) for n, value in enumerate(call.args)}
        values |= {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (ValueError, SyntaxError, TypeError, IndexError, MemoryError, RecursionError, AttributeError) as error:
        if only:
            return bare
        raise ValueError(f"write its arguments as {', '.join(f'{name}=...' for name in names) or '()'}") from error

    # 12 is a text where the parameter is one.
    is_text = only in values and not parameters.takes(only, values[only]) and parameters.takes(only, bare[only])
    return bare if is_text else values


def _tool_call(call: markup.Call) -> ToolCall:
    """Return a call as it was read. ValueError: it has no name, or its arguments are no object."""
    if isinstance(call, str):
        if len(call) > MAX_CHARACTERS:
            raise ValueError(f"it has more than {MAX_CHARACTERS} characters")
        read = json.loads(call)
        if not isinstance(read, dict) or not isinstance(read.get("name"), str):
            raise ValueError('it must be an object with a "name"')
        # Families differ in the key.
        call = read["name"], read.get("arguments", read.get("parameters"))

    name, arguments = call
    # Some write the arguments as JSON text, as OpenAI's format has them.
    arguments = {} if arguments in (None, "") else arguments
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        raise ValueError("its arguments must be an object")
    if not name:
        raise ValueError("it has no name")

    return ToolCall(name, arguments)


_READERS: dict[str, Callable[[str, Mapping[str, Schema]], markup.Found]] = {
    **{"hermes": markup.read_hermes, "llama3": _read_llama3, "plain": _read_plain, "mistral": markup.read_mistral},
    **{
        "deepseek": markup.read_deepseek,
        "harmony": markup.read_harmony,
        "glm": markup.read_glm,
        "qwen_xml": markup.qwen_xml,
    },
}
