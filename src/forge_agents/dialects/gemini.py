"""Google's generateContent, as Gemini CLI speaks it.

Its requests name the model, and whether to stream, in their path (`/v1beta/models/MODEL:streamGenerateContent`, or
`/v1/models/...` of newer clients): the gateway adds both to the body, as `model` and `stream`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ..messages import BadRequest, Call, Delta, Message, ModelRequest, ModelTurn, Schema
from . import fields
from .fields import Json

KNOWN = {"model", "stream", "contents", "systemInstruction", "tools", "toolConfig", "generationConfig"}
IGNORED = {"safetySettings", "labels", "serviceTier", "store"}
NEUTRAL: Mapping[str, Sequence[Json]] = {"cachedContent": ("",)}
# Settings of `generationConfig`, in the same three kinds as fields.
SAMPLING = ("temperature", "topP", "topK", "seed", "thinkingConfig")
SETTINGS = {
    *SAMPLING,
    *("model", "maxOutputTokens", "stopSequences", "responseMimeType", "responseSchema"),
    "responseJsonSchema",
}
NEUTRAL_SETTINGS: Mapping[str, Sequence[Json]] = {
    "presencePenalty": (0,),
    "frequencyPenalty": (0,),
    "responseModalities": (["TEXT"], []),
    "responseLogprobs": (False,),
    "candidateCount": (1,),
}
FINISH = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS"}
CHOICES = {"AUTO": "auto", "ANY": "required", "VALIDATED": "auto", "NONE": "none", "MODE_UNSPECIFIED": "auto"}
ERRORS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
SERVER_TOOLS = {"googleSearch", "googleSearchRetrieval", "urlContext", "codeExecution", "googleMaps"}
# Of a part; all other fields are of media, or of tools that Google's servers execute.
PARTS = {"text", "thought", "thoughtSignature", "functionCall", "functionResponse"}
# Fields whose values are the program's, with names of its choice.
FREE = {"args", "response", "parameters", "parametersJsonSchema", "responseSchema", "responseJsonSchema"}


class GeminiDialect:
    """Requests to `/v1beta/models/MODEL:generateContent`, `:streamGenerateContent?alt=sse` and `:countTokens`."""

    name = "gemini"
    id_prefix = "resp_"
    call_prefix = "call_"

    def read(self, body: Json) -> ModelRequest:
        """Parse a body. BadRequest: names the unsupported field."""
        fields.check_body(body)
        body = _camel(body)
        fields.check_fields(body, KNOWN, IGNORED, NEUTRAL)
        # The model stands for the one of the path: the check of fields wants one.
        config = {**fields.record(body.get("generationConfig"), "generationConfig"), "model": body["model"]}
        fields.check_fields(config, SETTINGS, (), NEUTRAL_SETTINGS)
        tools = tuple(_tools(fields.records(body.get("tools"), "tools", fields.MAX_TOOLS)))
        tool_config = fields.record(body.get("toolConfig"), "toolConfig")
        choice = _choice(fields.record(tool_config.get("functionCallingConfig"), "toolConfig.functionCallingConfig"))
        return ModelRequest(
            body["model"],
            fields.conversation(_messages(body), "contents"),
            tools,
            fields.check_choice(choice, tools),
            max_tokens=fields.integer(config, "maxOutputTokens"),
            stop=fields.stop_strings(config, "stopSequences"),
            schema=_schema(config),
            stream=fields.boolean(body, "stream"),
            stream_usage=True,
            overridden=fields.overridden(config, SAMPLING),
        )

    def complete(self, request: ModelRequest, turns: Sequence[ModelTurn]) -> Mapping[str, Json]:
        """The body of an answer that is not streamed."""
        turn = turns[0]
        parts: list[Json] = []
        if turn.thought:
            parts.append({"text": turn.thought, "thought": True})
        if turn.content:
            parts.append({"text": turn.content})
        parts += [_call_part(call) for call in turn.calls]
        return {**_answer(request, turn.id, parts, FINISH[turn.finish]), "usageMetadata": _usage(turn)}

    def events(self, request: ModelRequest, ids: Sequence[str]) -> GeminiEvents:
        """The writer of a streamed answer."""
        return GeminiEvents(request, ids)

    def error(self, error: BadRequest) -> Mapping[str, Json]:
        """The body of an error."""
        default = "INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT"
        body: dict[str, Json] = {"code": error.status, "message": str(error)}
        body["status"] = ERRORS.get(error.status, default)
        return {"error": body}


class GeminiEvents:
    """Writes one answer: each piece is an answer with one part."""

    def __init__(self, request: ModelRequest, ids: Sequence[str]) -> None:
        self._request = request
        self._id = ids[0]

    def begin(self, prompt_tokens: int) -> bytes:
        """Nothing: an answer begins with its first piece."""
        return b""

    def delta(self, delta: Delta) -> bytes:
        """An event for each kind of text in the piece, and for a call."""
        parts: list[Json] = []
        if delta.thought:
            parts.append({"text": delta.thought, "thought": True})
        if delta.content:
            parts.append({"text": delta.content})
        if delta.call is not None:
            parts.append(_call_part(delta.call))
        return b"".join(fields.server_sent(_answer(self._request, self._id, [part])) for part in parts)

    def end(self, turns: Sequence[ModelTurn]) -> bytes:
        """An empty part, why the answer ended, and usage."""
        last = _answer(self._request, self._id, [{"text": ""}], FINISH[turns[0].finish])
        return fields.server_sent({**last, "usageMetadata": _usage(turns[0])})

    def ping(self) -> bytes:
        """An answer without candidates: Gemini CLI takes a comment for an error."""
        return fields.server_sent({"modelVersion": self._request.model, "responseId": self._id})

    def failure(self, error: BadRequest) -> bytes:
        """An event with the body of the error."""
        return fields.server_sent(GeminiDialect().error(error))


def _answer(request: ModelRequest, identity: str, parts: Sequence[Json], finish: str = "") -> dict[str, Json]:
    candidate: dict[str, Json] = {"content": {"role": "model", "parts": list(parts)}, "index": 0}
    if finish:
        candidate["finishReason"] = finish
    return {"candidates": [candidate], "modelVersion": request.model, "responseId": identity}


def _call_part(call: Call) -> Json:
    return {"functionCall": {"id": call.id, "name": call.name, "args": json.loads(call.arguments)}}


def _usage(turn: ModelTurn) -> Mapping[str, int]:
    return {
        "promptTokenCount": turn.prompt_tokens,
        "cachedContentTokenCount": turn.cached_tokens,
        "candidatesTokenCount": turn.completion_tokens,
        "totalTokenCount": turn.prompt_tokens + turn.completion_tokens,
    }


def _camel(value: Json) -> Json:
    """A value with all names of fields as `fieldName`. Google reads `field_name` too, and its own clients send both."""
    if isinstance(value, list):
        return [_camel(item) for item in value]
    if not isinstance(value, dict):
        return value
    renamed = {}
    for name, item in value.items():
        first, *words = name.split("_")
        camel = first + "".join(word[:1].upper() + word[1:] for word in words)
        renamed[camel] = item if camel in FREE else _camel(item)
    return renamed


def _parts(content: Mapping[str, Json], path: str) -> list[dict[str, Json]]:
    """The parts of a content, of kinds that this model reads."""
    parts = fields.records(content.get("parts"), f"{path}.parts", fields.MAX_MESSAGES)
    for index, part in enumerate(parts):
        unread = sorted(name for name, value in part.items() if value is not None and name not in PARTS)
        if unread:
            kind = fields.shorten(unread[0])
            raise BadRequest(f"{path}.parts[{index}]: {kind} is not supported: this model reads text", path)
        if not isinstance(part.get("text", ""), str):
            raise BadRequest(f"{path}.parts[{index}].text must be a text", path)
    return parts


def _messages(body: Mapping[str, Json]) -> list[Message]:
    system = fields.record(body.get("systemInstruction"), "systemInstruction")
    texts = [part.get("text", "") for part in _parts(system, "systemInstruction")]
    messages: list[Message] = [{"role": "system", "content": "\n".join(texts)}]
    contents = fields.records(body.get("contents"), "contents", fields.MAX_MESSAGES)
    if not contents:
        raise BadRequest("contents must be a list of at least one content", "contents")
    # Calls without a result yet: clients may omit the ids of both, and then names and order tell which is whose.
    open_calls: list[Call] = []
    for index, content in enumerate(contents):
        path = f"contents[{index}]"
        parts = _parts(content, path)
        role = content.get("role") or "user"
        if role == "model":
            turn = _model_turn(parts, path, len(messages))
            open_calls += turn.get("calls", ())
            fields.append_assistant(messages, turn)
        elif role in ("user", "function"):
            _add_user(messages, parts, path, open_calls)
        else:
            raise BadRequest(f"{path}.role {fields.shorten(role)} is neither user nor model", path)
    return messages


def _model_turn(parts: Sequence[Mapping[str, Json]], path: str, number: int) -> Message:
    thought = "".join(part.get("text", "") for part in parts if part.get("thought"))
    content = "".join(part.get("text", "") for part in parts if not part.get("thought"))
    calls: list[Call] = []
    for part in parts:
        if part.get("functionCall") is None:
            continue
        function = fields.record(part["functionCall"], f"{path}.functionCall")
        arguments = fields.arguments_of(function.get("args") or {}, f"{path}.functionCall.args")
        identity = function.get("id") or f"call_{number}_{len(calls)}"
        calls.append(Call(str(identity), fields.string(function, "name", f"{path}.functionCall"), arguments))
    return fields.assistant(thought, content, calls)


def _add_user(messages: list[Message], parts: Sequence[Mapping[str, Json]], path: str, open_calls: list[Call]) -> None:
    """Add the results of tools among parts, and then the texts as one message of the user."""
    for part in parts:
        if part.get("functionResponse") is None:
            continue
        function = fields.record(part["functionResponse"], f"{path}.functionResponse")
        name = fields.string(function, "name", f"{path}.functionResponse")
        identity = function.get("id")
        # The first call of the name that has no result yet, if the client sends no ids.
        call = next((call for call in open_calls if identity in (None, call.id) and call.name == name), None)
        if call is not None:
            open_calls.remove(call)
        elif identity is None:
            raise BadRequest(f"{path}: there is no call of {fields.shorten(name)} that this is the result of", path)
        call_id = call.id if call is not None else str(identity)
        text = _result(function.get("response"))
        messages.append({"role": "tool", "content": text, "call_id": call_id, "name": name})
    texts = [part["text"] for part in parts if part.get("text")]
    # A message without any part is an empty one of the user.
    if texts or not any(part.get("functionResponse") for part in parts):
        messages.append({"role": "user", "content": "\n".join(texts)})


def _result(value: Json) -> str:
    """The text of a result, which clients wrap into an object."""
    if isinstance(value, dict) and len(value) == 1:
        [(name, text)] = value.items()
        if name in ("output", "result") and isinstance(text, str):
            return text
        if name == "error" and isinstance(text, str):
            return text if "error" in text[:80].lower() else f"error: {text}"
    return json.dumps(value, ensure_ascii=False)


def _tools(tools: Sequence[Mapping[str, Json]]) -> list[Schema]:
    schemas = []
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        unsupported = sorted(tool.keys() - SERVER_TOOLS - {"functionDeclarations"})
        if unsupported:
            raise BadRequest(f"{path}: the tool {fields.shorten(unsupported[0])} is not supported", "tools")
        for function in fields.records(tool.get("functionDeclarations"), f"{path}.functionDeclarations", 1024):
            name = fields.string(function, "name", f"{path}.functionDeclarations")
            parameters = function.get("parametersJsonSchema") or _json_schema(function.get("parameters"))
            schemas.append(fields.tool_schema(name, function.get("description"), parameters, path))
    return schemas


def _json_schema(schema: Json) -> Json:
    """A schema in Google's form as a JSON schema: names of types in lower case, null as one of the types."""
    if isinstance(schema, list):
        return [_json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    # Also below `properties`, where "type" may be the name of a property, whose value is an object.
    lowered = {name: _json_schema(value) for name, value in schema.items()}
    kind = lowered.get("type")
    if isinstance(kind, str):
        lowered["type"] = [kind.lower(), "null"] if lowered.pop("nullable", None) is True else kind.lower()
    return lowered


def _choice(config: Mapping[str, Json]) -> str:
    mode = config.get("mode") or "AUTO"
    names = config.get("allowedFunctionNames") or []
    if not isinstance(mode, str) or mode not in CHOICES:
        raise BadRequest(f"toolConfig: the mode {fields.shorten(mode)} is not supported", "toolConfig")
    if not isinstance(names, list) or len(names) > 1 or (names and mode != "ANY"):
        raise BadRequest("toolConfig: allowedFunctionNames may be one name, with the mode ANY", "toolConfig")
    return f"function:{names[0]}" if names else CHOICES[mode]


def _schema(config: Mapping[str, Json]) -> Mapping[str, Json] | None:
    kind = config.get("responseMimeType") or "text/plain"
    if kind == "text/plain":
        return None
    if kind != "application/json":
        raise BadRequest(f"responseMimeType {fields.shorten(kind)} is not supported", "generationConfig")
    schema = config.get("responseJsonSchema") or _json_schema(config.get("responseSchema"))
    return fields.json_schema({"type": "object"} if schema is None else schema, "generationConfig.responseSchema")
