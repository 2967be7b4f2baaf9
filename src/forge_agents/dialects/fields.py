"""Parsing of request fields that all client APIs share, with errors that name the unsupported field.

How messages are normalised:
- Text that a client sends in several parts is joined. The parts of an assistant's message are pieces of one sampled
  text, and are joined without a separator; other parts are joined by line breaks.
- Leading system messages become one message, separated by empty lines. A later system message becomes a message of the
  user, since chat templates support a system message only at the beginning.
"""

import json
from base64 import urlsafe_b64encode
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

from forge.config.plugin import hint_nearest
from forge.data.writer import thought_of

from ..messages import BadRequest, Call, Message, Schema

Json = Any  # a value in the JSON of a request
MAX_TOKENS = 1 << 31
MAX_TOP_LOGPROBS = 20
MAX_SHOWN = 60  # characters of a value in an error


def shorten_value(value: Json) -> str:
    """Format a value of a request for an error message, cut to its first characters.

    >>> shorten_value("x" * 70)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
    """
    text = repr(value[:MAX_SHOWN] if isinstance(value, str | list) else value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def require_field(is_right: bool, name: str, what: str, value: Json) -> None:
    """Raise BadRequest unless a field is valid.

    Args:
        is_right: whether it is valid.
        name: the field, as the error names it.
        what: what the field must be, such as "a text".
        value: what the client sent.
    """
    if not is_right:
        raise BadRequest(f"{name} must be {what}, got {shorten_value(value)}", name)


def check_fields(
    body: Json, supported: Collection[str], ignored: Collection[str], neutral: Mapping[str, Sequence[Json]]
) -> None:
    """Raise BadRequest unless a request's body is an object with a model and without unsupported fields.

    Args:
        supported: the fields that the caller reads.
        ignored: fields that may have any value, since they have no effect on the tokens.
        neutral: unsupported fields, each with the values that have no effect and are therefore accepted.
    """
    require_field(isinstance(body, dict), "the body", "a JSON object", body)
    for name, value in body.items():
        # Clients send null for fields that have the server's default.
        if value is None or name in supported or name in ignored:
            continue
        if name not in neutral:
            hint = hint_nearest(name[:MAX_SHOWN], sorted(supported))
            raise BadRequest(f"unknown field {shorten_value(name)}{hint}", name[:MAX_SHOWN])
        if value not in neutral[name]:
            raise BadRequest(f"{name} = {shorten_value(value)} is not supported", name)
    require_field(isinstance(body.get("model"), str), "model", "the name of a model", body.get("model"))


def read_integer(body: Mapping[str, Json], name: str, lowest: int = 1, highest: int = MAX_TOKENS) -> int | None:
    """Return the whole number of a field; None if the field is absent or null.

    Raises:
        BadRequest: it is another type, or outside `lowest` to `highest`.
    """
    value = body.get(name)
    limits = f"{lowest} or more" if highest == MAX_TOKENS else f"{lowest} to {highest}"
    # `type`, not `isinstance`: True is an int in Python.
    is_right = value is None or (type(value) is int and lowest <= value <= highest)
    require_field(is_right, name, f"a whole number, {limits}", value)
    return value


def read_boolean(body: Mapping[str, Json], name: str, default: bool = False) -> bool:
    """Return the boolean of a field, `default` if it is absent or null; BadRequest if it is another type."""
    value = body.get(name)
    require_field(value is None or isinstance(value, bool), name, "true or false", value)
    return default if value is None else value


def read_object(value: Json, path: str) -> Mapping[str, Json]:
    """Return a value that must be a JSON object, {} for null; BadRequest, naming `path`, if it is another type."""
    require_field(value is None or isinstance(value, dict), path, "an object", value)
    return value or {}


def read_objects(value: Json, path: str) -> list[tuple[str, dict[str, Json]]]:
    """Return the objects of a JSON list, each with its path in the request; BadRequest if it is anything else.

    >>> read_objects([{"role": "user"}], "messages")
    [('messages[0]', {'role': 'user'})]
    >>> read_objects(None, "tools")
    []
    """
    items = [] if value is None else value
    is_right = isinstance(items, list) and all(isinstance(item, dict) for item in items)
    require_field(is_right, path, "a list of objects", value)
    return [(f"{path}[{index}]", item) for index, item in enumerate(items)]


def read_string(item: Mapping[str, Json], name: str, path: str) -> str:
    """Return the field `name` of an object at `path`; BadRequest unless it is a text that is not empty."""
    value = item.get(name)
    require_field(isinstance(value, str) and value != "", f"{path}.{name}", "a text that is not empty", value)
    return str(value)


def stop_strings(body: Mapping[str, Json], name: str) -> tuple[str, ...]:
    """Return the stop strings of a field, which is one text or a list; BadRequest if it is neither.

    >>> stop_strings({"stop": "END"}, "stop")
    ('END',)
    """
    value = body.get(name)
    stops = [value] if isinstance(value, str) else value or []
    is_right = isinstance(stops, list) and all(isinstance(item, str) and item for item in stops)
    require_field(is_right, name, "a text or a list of texts that are not empty", value)
    return tuple(stops)


def overridden_settings(body: Mapping[str, Json], names: Iterable[str]) -> dict[str, Json]:
    """Return the fields of a request, among `names`, that are set: those that the run decides instead of the client.

    >>> overridden_settings({"temperature": 0.5, "seed": None}, ["temperature", "seed"])
    {'temperature': 0.5}
    """
    return {name: body[name] for name in names if body.get(name) is not None}


def text_of(content: Json, path: str, kinds: Mapping[str, str], joint: str = "\n") -> str:
    """Return the text of a message's content, which is a text, a list of parts, or null for "".

    Args:
        path: where the content is in the request, for errors.
        kinds: for each supported type of part, the field with its text.
        joint: the separator between two parts.

    Raises:
        BadRequest: a part has another type, such as an image.

    >>> text_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "content", {"text": "text"})
    'a\\nb'
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for _, part in read_objects(content, path):
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in kinds:
            raise BadRequest(
                f"{path}: a part of type {shorten_value(kind)} is not supported: this model reads text", path
            )
        text = part.get(kinds[kind])
        require_field(isinstance(text, str), f"{path}: the {kinds[kind]} of a part", "a text", text)
        texts.append(str(text))
    return joint.join(texts)


def tool_schema(name: str, description: Json, parameters: Json, path: str) -> Schema:
    """Return a tool in OpenAI's format, as in `ModelRequest.tools`, for any client API.

    Args:
        description: a text; any other value is ignored.
        parameters: a JSON schema; null: the tool has no parameters.
        path: where the tool is in the request, for errors.
    """
    # Other fields of a tool are not for the model, so that it gets the same text through each API.
    function = {
        "name": name,
        **({"description": description} if isinstance(description, str) and description else {}),
        "parameters": read_object(parameters, f"{path}.parameters") or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def check_choice(choice: str, tools: Sequence[Schema]) -> str:
    """Check that the request has the tools that a tool choice needs, and return the choice; BadRequest otherwise.

    Args:
        choice: as in `ModelRequest.tool_choice`.
    """
    name = choice.removeprefix("function:")
    if choice == "required" and not tools:
        raise BadRequest(
            "tool_choice requires a tool call, but tools is empty: add tools, or omit tool_choice", "tool_choice"
        )
    if name != choice and name not in [tool["function"]["name"] for tool in tools]:
        raise BadRequest(f"tool_choice names {shorten_value(name)}, which is not in tools", "tool_choice")
    return choice


def openai_choice(choice: Json, tools: Sequence[Schema]) -> str:
    """Return the field `tool_choice` of OpenAI's two APIs in the form of `ModelRequest.tool_choice`.

    Raises:
        BadRequest: it is unsupported, or needs a tool that the request does not have.

    >>> tools = [tool_schema("search", "", None, "tools[0]")]
    >>> openai_choice({"type": "function", "function": {"name": "search"}}, tools)
    'function:search'
    """
    if isinstance(choice, dict) and choice.get("type") == "function":
        # Chat Completions has the name in an object "function", Responses in the choice itself.
        function = read_object(choice.get("function", choice), "tool_choice.function")
        name = read_string(function, "name", "tool_choice")
        namespace = f"{function['namespace']}." if function.get("namespace") else ""
        choice = f"function:{namespace}{name}"
    elif choice not in (None, "auto", "none", "required"):
        raise BadRequest(f"tool_choice = {shorten_value(choice)} is not supported", "tool_choice")
    return check_choice(choice or "auto", tools)


def arguments_of(value: Json, path: str) -> str:
    """Return the arguments of a tool call as the text of a JSON object.

    Args:
        value: such a text, an object, or null for no arguments.
        path: where it is in the request, for errors.

    Raises:
        BadRequest: it is anything else.

    >>> arguments_of({"query": "x"}, "arguments")
    '{"query": "x"}'
    """
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    parsed = None
    # RecursionError: thousands of nested brackets.
    with suppress(ValueError, TypeError, RecursionError):
        parsed = json.loads(value or "{}")
    require_field(isinstance(value, str | None) and isinstance(parsed, dict), path, "the text of a JSON object", value)
    return value or "{}"


def answer_schema(form: Json, path: str) -> Mapping[str, Json] | None:
    """Return the JSON schema that the text of an answer must satisfy; None: any text is allowed.

    Args:
        form: the field of a request that describes the answer's format, such as {"type": "json_object"}.
        path: the name of this field: only "response_format" needs the schema in an object "json_schema".

    Raises:
        BadRequest: the format is unsupported, or has no schema.
    """
    options = read_object(form, path)
    kind = options.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise BadRequest(f"{path} of type {shorten_value(kind)} is not supported", path.partition(".")[0])
    if "json_schema" in options or path == "response_format":
        path += ".json_schema"
        options = read_object(options.get("json_schema"), path)
    schema = options.get("schema")
    require_field(isinstance(schema, dict), f"{path}.schema", "a JSON schema", schema)
    return schema  # type: ignore[no-any-return]


def assistant_message(thought: str = "", content: str = "", calls: Sequence[Call] = ()) -> Message:
    """Return an assistant's message in the form of `ModelRequest.messages`.

    Args:
        thought: "": it is taken from the content if that starts with <think>, where Pydantic AI writes it.
    """
    if not thought and content.lstrip().startswith("<think>") and "</think>" in content:
        thought, content = thought_of({"content": content})
    return {
        **{"role": "assistant", "content": content},
        **({"thought": thought} if thought else {}),
        **({"calls": list(calls)} if calls else {}),
    }


def append_assistant(messages: list[Message], piece: Message) -> None:
    """Append a piece of an assistant's turn to a conversation: its thought, its text or a tool call.

    For APIs that send these pieces one by one. The piece is merged into the last message if that is the same turn. A
    turn starts with its one thought and has one text, so that a second thought or text starts another turn.

    Args:
        messages: the conversation so far, which is changed.
    """
    turn = messages[-1] if messages else None
    if turn is None or turn["role"] != "assistant" or "thought" in piece or (turn["content"] and piece["content"]):
        messages.append(piece)
        return
    messages[-1] = assistant_message(
        turn.get("thought", ""), turn["content"] + piece["content"], [*turn.get("calls", ()), *piece.get("calls", ())]
    )


def arrange_conversation(messages: Sequence[Message], path: str) -> tuple[Message, ...]:
    """Return the messages of a request with at most one system message, at the beginning, and with named tool results.

    Leading system messages are joined, later ones become messages of the user. The message of a tool's result gets the
    name of the tool from the call with its id.

    Raises:
        BadRequest: there is no message.
    """
    if not messages:
        raise BadRequest(f"{path} must have at least one message", path)

    leading = list(takewhile(lambda message: message["role"] == "system", messages))
    system = "\n\n".join(message["content"] for message in leading if message["content"])
    arranged: list[Message] = [{"role": "system", "content": system}] if system else []
    names: dict[str, str] = {}  # of the called tools, by the id of the call

    for message in messages[len(leading) :]:
        names.update((call.id, call.name) for call in message.get("calls", ()))
        if message["role"] == "system":
            message = {**message, "role": "user"}
        elif message["role"] == "tool":
            message = {**message, "name": message.get("name") or names.get(message["call_id"], "")}
        arranged.append(message)

    return tuple(arranged)


def opaque_token(identity: str) -> str:
    """Return a token for fields where an API has a signature or encrypted text, which a client only sends back.

    >>> opaque_token("msg_1")
    'bXNnXzE='
    """
    return urlsafe_b64encode(identity.encode()).decode()


def server_sent(data: Mapping[str, Json], event: str = "") -> bytes:
    """Return one server-sent event: its name, unless it is "", and its data as JSON.

    >>> server_sent({"type": "ping"}, "ping")
    b'event: ping\\ndata: {"type": "ping"}\\n\\n'
    """
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


# By HTTP status. Clients decide by the type as well as by the status whether to retry.
OPENAI_ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def openai_error(error: BadRequest) -> Mapping[str, Json]:
    """Return the JSON body of an error in OpenAI's APIs."""
    kind = "server_error" if error.status >= 500 else OPENAI_ERRORS.get(error.status, "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.field, "code": error.code}}
