"""Fields of requests in every dialect: what a client may send, and the error that names what cannot be honoured.

Text that comes in several parts is joined by nothing in an assistant's message, whose parts are pieces of one text that
was sampled, and by line breaks elsewhere. Leading system messages become one, with empty lines between them; a later
one becomes a message of the user, since templates know a system message at the beginning only.
"""

import json
from base64 import urlsafe_b64encode
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

from forge.config.plugin import hint_nearest
from forge.data.turns import thought_of

from ..messages import BadRequest, Call, Message, Schema

Json = Any  # a value of a request
MAX_TOKENS = 1 << 31
MAX_TOP_LOGPROBS = 20
MAX_SHOWN = 60  # characters of a value in an error


def shorten_value(value: Json) -> str:
    """Format a value of a request for an error: at most its first characters.

    >>> shorten_value("x" * 70)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
    """
    text = repr(value[:MAX_SHOWN] if isinstance(value, str | list) else value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def require_field(is_right: bool, name: str, what: str, value: Json) -> None:
    """Raise BadRequest unless a field is what it must be."""
    if not is_right:
        raise BadRequest(f"{name} must be {what}, got {shorten_value(value)}", name)


def check_fields(
    body: Json, supported: Collection[str], ignored: Collection[str], neutral: Mapping[str, Sequence[Json]]
) -> None:
    """Raise BadRequest unless this is an object whose fields can all be honoured. A field that is null is absent.

    Args:
        supported: fields that the caller reads.
        ignored: fields without effect on the tokens.
        neutral: unsupported fields, each with the values that change nothing.
    """
    require_field(isinstance(body, dict), "the body", "a JSON object", body)
    for name, value in body.items():
        # Clients send the fields that they leave to the server as null.
        if value is None or name in supported or name in ignored:
            continue
        if name not in neutral:
            hint = hint_nearest(name[:MAX_SHOWN], sorted(supported))
            raise BadRequest(f"unknown field {shorten_value(name)}{hint}", name[:MAX_SHOWN])
        if value not in neutral[name]:
            raise BadRequest(f"{name} = {shorten_value(value)} is not supported", name)
    require_field(isinstance(body.get("model"), str), "model", "the name of a model", body.get("model"))


def read_integer(body: Mapping[str, Json], name: str, lowest: int = 1, highest: int = MAX_TOKENS) -> int | None:
    """Return a field with a whole number, None if it is absent."""
    value = body.get(name)
    limits = f"{lowest} or more" if highest == MAX_TOKENS else f"{lowest} to {highest}"
    # In Python, true is a number too.
    is_right = value is None or (type(value) is int and lowest <= value <= highest)
    require_field(is_right, name, f"a whole number, {limits}", value)
    return value


def read_boolean(body: Mapping[str, Json], name: str, default: bool = False) -> bool:
    """Return a field that is true or false."""
    value = body.get(name)
    require_field(value is None or isinstance(value, bool), name, "true or false", value)
    return default if value is None else value


def read_object(value: Json, path: str) -> Mapping[str, Json]:
    """Return a value that must be an object; null is an empty one."""
    require_field(value is None or isinstance(value, dict), path, "an object", value)
    return value or {}


def read_objects(value: Json, path: str) -> list[tuple[str, dict[str, Json]]]:
    """Return the objects of a list, each with its path; null is an empty list."""
    items = [] if value is None else value
    is_right = isinstance(items, list) and all(isinstance(item, dict) for item in items)
    require_field(is_right, path, "a list of objects", value)
    return [(f"{path}[{index}]", item) for index, item in enumerate(items)]


def read_string(item: Mapping[str, Json], name: str, path: str) -> str:
    """Return a field of an object that must be a text which is not empty."""
    value = item.get(name)
    require_field(isinstance(value, str) and value != "", f"{path}.{name}", "a text that is not empty", value)
    return str(value)


def stop_strings(body: Mapping[str, Json], name: str) -> tuple[str, ...]:
    """Return the stop strings of a field: one or a list."""
    value = body.get(name)
    stops = [value] if isinstance(value, str) else value or []
    is_right = isinstance(stops, list) and all(isinstance(item, str) and item for item in stops)
    require_field(is_right, name, "a text or a list of texts that are not empty", value)
    return tuple(stops)


def overridden_settings(body: Mapping[str, Json], names: Iterable[str]) -> dict[str, Json]:
    """Return the settings that the request has and the run decides."""
    return {name: body[name] for name in names if body.get(name) is not None}


def text_of(content: Json, path: str, kinds: Mapping[str, str], joint: str = "\n") -> str:
    """Return the text of a message's content, which is a text or a list of parts; null is "".

    Args:
        kinds: the types of parts that are text, each with the field that holds it.
        joint: what is put between two parts.
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
    """Return a tool in the form of `ModelRequest.tools`."""
    # Nothing else of a tool is for the model; so a tool reads the same to it in each dialect.
    function: dict[str, Json] = {"name": name}
    if isinstance(description, str) and description:
        function["description"] = description
    function["parameters"] = read_object(parameters, f"{path}.parameters") or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def check_choice(choice: str, tools: Sequence[Schema]) -> str:
    """Return a tool choice that these tools can satisfy."""
    name = choice.removeprefix("function:")
    if choice == "required" and not tools:
        raise BadRequest("tool_choice asks for a call, but tools is empty", "tool_choice")
    if name != choice and name not in [tool["function"]["name"] for tool in tools]:
        raise BadRequest(f"tool_choice names {shorten_value(name)}, which is none of the tools", "tool_choice")
    return choice


def openai_choice(choice: Json, tools: Sequence[Schema]) -> str:
    """Return the tool choice of OpenAI's dialects, of which one has the name in a separate object."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = read_object(choice.get("function", choice), "tool_choice.function")
        name = read_string(function, "name", "tool_choice")
        namespace = f"{function['namespace']}." if function.get("namespace") else ""
        choice = f"function:{namespace}{name}"
    elif choice not in (None, "auto", "none", "required"):
        raise BadRequest(f"tool_choice = {shorten_value(choice)} is not supported", "tool_choice")
    return check_choice(choice or "auto", tools)


def arguments_of(value: Json, path: str) -> str:
    """Return a call's arguments as text: what the client sent, or an object as JSON."""
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    parsed = None
    # A few thousand brackets, one in the other, are too deep for the parser.
    with suppress(ValueError, TypeError, RecursionError):
        parsed = json.loads(value or "{}")
    require_field(isinstance(value, str | None) and isinstance(parsed, dict), path, "the text of a JSON object", value)
    return value or "{}"


def answer_schema(form: Json, path: str) -> Mapping[str, Json] | None:
    """Return the schema that an answer must keep, of a field that names its form; None: any text."""
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
    """Return a message of the assistant. A thought that a client wrote into the text, as Pydantic AI does, is its
    thought."""
    if not thought and content.lstrip().startswith("<think>") and "</think>" in content:
        thought, content = thought_of({"content": content})
    message: Message = {"role": "assistant", "content": content}
    if thought:
        message["thought"] = thought
    if calls:
        message["calls"] = list(calls)
    return message


def append_assistant(messages: list[Message], piece: Message) -> None:
    """Add a piece of a turn, for dialects that send the thought, the text and the calls of one turn one by one.

    A turn has one thought, at its beginning, and one text. A second of either starts another turn.
    """
    # What is before it belongs to the same turn only if it is of the assistant, and could come before it in a turn.
    turn = messages[-1] if messages else None
    if turn is None or turn["role"] != "assistant" or "thought" in piece or (turn["content"] and piece["content"]):
        messages.append(piece)
        return
    calls = [*turn.get("calls", ()), *piece.get("calls", ())]
    messages[-1] = assistant_message(turn.get("thought", ""), turn["content"] + piece["content"], calls)


def arrange_conversation(messages: Sequence[Message], path: str) -> tuple[Message, ...]:
    """Arrange the messages of a request: see this module's docstring. Results of tools get the name of their call."""
    if not messages:
        raise BadRequest(f"{path} must have at least one message", path)

    # Templates want one system message, and at the beginning.
    leading = list(takewhile(lambda message: message["role"] == "system", messages))
    system = "\n\n".join(message["content"] for message in leading if message["content"])
    arranged: list[Message] = [{"role": "system", "content": system}] if system else []
    names: dict[str, str] = {}

    for message in messages[len(leading) :]:
        names.update((call.id, call.name) for call in message.get("calls", ()))
        if message["role"] == "system":
            message = {**message, "role": "user"}
        elif message["role"] == "tool":
            message = {**message, "name": message.get("name") or names.get(message["call_id"], "")}
        arranged.append(message)

    return tuple(arranged)


def opaque_token(identity: str) -> str:
    """Return a token that means nothing to a client, where its dialect expects a signature or encrypted text.

    >>> opaque_token("msg_1")
    'bXNnXzE='
    """
    return urlsafe_b64encode(identity.encode()).decode()


def server_sent(data: Mapping[str, Json], event: str = "") -> bytes:
    """Return one server-sent event."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


# Clients decide by the type as much as by the status whether they try again.
OPENAI_ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def openai_error(error: BadRequest) -> Mapping[str, Json]:
    """Return the body of an error in both dialects of OpenAI."""
    kind = "server_error" if error.status >= 500 else OPENAI_ERRORS.get(error.status, "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.field, "code": error.code}}
