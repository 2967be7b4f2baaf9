"""Tools for the policy, which are Python functions or remote, and an environment in which it can call them."""

import asyncio
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, Union

from forge.data.messages import OPTIONS, row_system, with_system
from forge.data.prompts import QUESTION_FIELDS
from forge.rewards.arguments import Answers, RewardCall
from forge.rewards.verifier import Unscored
from forge.types import Prompt, Sample
from forge.types.conversation import as_text
from forge_verifiers.threads import await_within, in_own_thread

from .content import shorten_text
from .environment import Action, Environment, InfrastructureError, Message, Step, ToolCall
from .schemas import Arguments, Parameters

Schema = dict[str, Any]
Tool = Callable[..., Any]

_TYPES: dict[Any, str] = {
    **{str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", type(None): "null"}
}


class ToolServer(Protocol):
    """A server of remote tools, such as those of `forge_envs.mcp`."""

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """Return the schemas of the server's tools in OpenAI's format."""

    async def call(self, name: str, arguments: Arguments) -> str:
        """Call a tool, and return its result as text.

        Raises:
            ToolError: the call failed; the policy is shown the message.
            InfrastructureError: the server failed; the episode is retried.
        """


class ToolError(Exception):
    """Error: a tool call failed; the message is shown to the policy."""


class Toolbox:
    """A set of tools, which runs the calls of one turn concurrently.

    Every call is answered by one message with its result or its error. The only exception that is raised is
    InfrastructureError.

    Args:
        tools: functions with annotated parameters. Plain ones run in a thread, async ones in the event loop. Results
            other than texts are shown as JSON.
        servers: servers of remote tools.
        timeout: seconds for one call.
        max_chars: the most characters of a message, after which it is cut.
        max_calls: the most calls of one turn; further ones are answered by an error.

    Raises:
        ValueError: a function has no schema (see `schema_of`), two tools have the same name, or the parameters of a
            remote tool are not a JSON schema.
    """

    def __init__(
        self,
        *tools: Tool,
        servers: Sequence[ToolServer] = (),
        timeout: float = 30.0,
        max_chars: int = 8192,
        max_calls: int = 16,
    ) -> None:
        self._timeout, self._max_chars, self._max_calls = timeout, max_chars, max_calls
        self._functions = {tool.__name__: tool for tool in tools}
        self._servers: dict[str, ToolServer] = {}
        self._schemas: dict[str, Schema] = {}

        all_schemas = [schema_of(tool) for tool in tools]
        for server in servers:
            server_schemas = [dict(schema) for schema in server.schemas()]
            self._servers |= {schema["function"]["name"]: server for schema in server_schemas}
            all_schemas += server_schemas

        for schema in all_schemas:
            if self._schemas.setdefault(schema["function"]["name"], schema) is not schema:
                raise ValueError(f"two tools have the name {schema['function']['name']}")
        self._parameters = {name: Parameters(schema["function"]) for name, schema in self._schemas.items()}

    @property
    def schemas(self) -> tuple[Schema, ...]:
        """Return the schemas of all tools in OpenAI's format."""
        return tuple(self._schemas.values())

    async def answer(self, action: Action) -> list[Message]:
        """Run the calls of a turn, and return a message for each of them, in order, and for each malformed call."""
        texts = await asyncio.gather(*map(self._run_call, action.calls[: self._max_calls]))
        texts += [f"error: not run: a turn may make {self._max_calls} calls"] * (len(action.calls) - len(texts))
        answers = [
            {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text}
            for call, text in zip(action.calls, texts, strict=True)
        ]
        errors = [{"role": "tool", "name": "error", "content": f"error: {error}"} for error in action.errors]
        return [*answers, *errors]

    def _round_integers(self, call: ToolCall) -> dict[str, Any]:
        """Return a call's arguments with integers for values like 2.0, which JSON Schema accepts as an integer."""
        schemas = self._parameters[call.name].properties
        return {
            name: int(value) if isinstance(value, float) and schemas[name].get("type") == "integer" else value
            for name, value in call.arguments.items()
        }

    async def _run_call(self, call: ToolCall) -> str:
        # Run one call, and return its result or its error as text, cut to `max_chars`.
        if call.name not in self._schemas:
            return f"error: there is no tool {call.name!r}: there is {', '.join(self._schemas)}"
        try:
            if problem := self._parameters[call.name].mismatch(call.arguments):
                raise ToolError(f"{call.name}: {problem}")

            if (function := self._functions.get(call.name)) is None:
                result = await await_within(
                    self._timeout, self._servers[call.name].call(call.name, call.arguments), call.name
                )
            elif inspect.iscoroutinefunction(function):
                result = await await_within(self._timeout, function(**self._round_integers(call)), call.name)
            else:
                bound_function = functools.partial(function, **self._round_integers(call))
                result = await in_own_thread(bound_function, limit=self._timeout, name=call.name)

            try:
                text = as_text(result)
            except (TypeError, ValueError, RecursionError):
                text = str(result)
        except InfrastructureError:
            raise
        except (Unscored, ToolError) as error:  # Unscored: the call took more than `timeout` seconds
            text = f"error: {error}"
        except Exception as error:
            text = f"error: {call.name} raised {type(error).__name__}: {error}"

        return shorten_text(text, self._max_chars)


def schema_of(function: Tool) -> Schema:
    """Return the schema of a Python function in OpenAI's format.

    It has the function's name, the first paragraph of its docstring as the description, and the annotated parameters.

    Raises:
        ValueError: a parameter has no annotation or a type that JSON does not have, or cannot be given by its name.

    >>> def roll(sides: int = 6) -> int:
    ...     "Roll a die."
    >>> schema_of(roll)["function"]["parameters"]
    {'type': 'object', 'properties': {'sides': {'type': 'integer'}}, 'required': []}
    """
    hints = typing.get_type_hints(function)
    properties: dict[str, Schema] = {}
    required = []

    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(
                f"tool {function.__name__}: parameter {name} must be accepted by name (no *args, **kwargs or "
                "positional-only)"
            )
        if name not in hints:
            raise ValueError(f"tool {function.__name__}: parameter {name} needs an annotation, such as {name}: str")
        try:
            properties[name] = _type_schema(hints[name], optional=parameter.default is not parameter.empty)
        except ValueError as error:
            raise ValueError(f"tool {function.__name__}: parameter {name}: {error}") from None
        if parameter.default is parameter.empty:
            required.append(name)

    first_paragraph, *_ = (inspect.getdoc(function) or "").split("\n\n")
    description = " ".join(first_paragraph.split())
    return {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


def _type_schema(hint: Any, *, optional: bool = False) -> Schema:
    """Return the JSON schema of an annotation's type.

    Args:
        optional: whether the parameter has a default. Then None is not part of the schema: a call omits the parameter.

    Raises:
        ValueError: JSON does not have the type.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if hint is list or origin is list:
        return {"type": "array", **({"items": _type_schema(arguments[0])} if arguments else {})}
    if origin is dict:
        return {"type": "object"}
    if origin in (Union, types.UnionType):
        kinds = [_type_schema(argument) for argument in arguments if not (optional and argument is type(None))]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    raise ValueError(f"{hint} has no JSON form: use str, int, float, bool, list, dict, Literal or a union of them")


class ToolEnvironment(Environment):
    """An environment that asks a question, which the policy answers after any number of turns with tool calls.

    The first turn without a call is the answer, and ends the episode. A truncated answer has reward 0.

    Args:
        tools: the available tools.
        score: a reward function, plain or async. Each parameter gets what its name says: `response` (the answer),
            `prompt`, `target`, a column of the row, `messages` (the whole conversation, with calls and their results),
            `env` (this environment) or `state`.
        system: a system message before the question; None: no such message.
        turn_reward: the reward of each turn with a tool call; a negative one discourages calls.
        state: an object that the tools of this episode change, for `score`.

    Raises:
        ValueError: a parameter of `score` has another name, or it scores groups.
    """

    def __init__(
        self,
        tools: Toolbox,
        score: Callable[..., Any],
        *,
        system: str | None = None,
        turn_reward: float = 0.0,
        state: Any = None,
    ) -> None:
        self.tools, self.score, self.system, self.turn_reward = tools, score, system, turn_reward
        self.state = state
        self.messages: list[Message] = []
        self._call = RewardCall(score, getattr(score, "__name__", type(score).__name__))
        if self._call.is_group:
            raise ValueError(
                f"{self._call.name} scores a group, but an environment plays one episode: use the parameter response "
                "instead of responses"
            )

    async def reset(self, task: Sample | Mapping[str, Any] | str, *, seed: int) -> Step:
        """Return the system message, the question and the schemas of the tools.

        Args:
            task: a sample; a question; or a mapping with a question and an answer, which clients of a server send.

        Raises:
            ValueError: the task has no question.
        """
        self.task = task if isinstance(task, Sample) else _sample_of_task(task)
        prompt = self.task.prompt
        given = {name for name in ("tools", OPTIONS) if prompt.row.get(name)} - self._call.names
        if given:
            raise ValueError(
                f"the row has {', '.join(sorted(given))}, but the environment provides the tools: remove the column"
            )
        messages = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
        self.messages = with_system(messages, self.system or row_system(prompt.row))
        return Step(tuple(self.messages), tools=self.tools.schemas)

    async def step(self, action: Action) -> Step:
        """Return the results of a turn's tool calls, malformed ones included, or score a turn without calls."""
        if action.calls or action.errors:
            answers = await self.tools.answer(action)
            self.messages += [{"role": "assistant", "content": action.text}, *answers]
            return Step(tuple(answers), self.turn_reward)
        if action.truncated:
            return Step(truncated=True)
        prompt, target = self.task
        reward = self._call(
            Answers(
                prompt.text, [action.content], target, {**prompt.row, "env": self, "state": self.state}, self.messages
            ),
            0,
        )
        return Step(reward=await reward if inspect.isawaitable(reward) else reward, terminated=True)


def _sample_of_task(task: Mapping[str, Any] | str) -> Sample:
    # Return a task in plain JSON as a sample, whose prompt has no tokens; ValueError if it has no question.
    row = task if isinstance(task, Mapping) else {"question": task}
    question = next((row[name] for name in QUESTION_FIELDS if isinstance(row.get(name), str)), None)
    target = row.get("answer", row.get("target", ""))
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"a task must be a question, or a mapping with a question and an answer, not {task!r:.80}")
    return Sample(Prompt(question, ()), target if isinstance(target, str) else str(target))
