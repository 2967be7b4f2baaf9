"""Tools: schemas from signatures, and calls that always have an answer."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Literal

import pytest

from forge_envs import Action, Toolbox, ToolCall, ToolError, schema_of
from forge_envs.content import text_of
from forge_envs.openenv.environment import OpenEnvEnvironment, _result_text
from forge_envs.openenv.wire import Reply


def weather(city: str, unit: Literal["C", "F"] = "C", days: int = 1, detail: list[str] | None = None) -> dict:
    """How the weather is.

    More than the model needs to know.
    """
    return {"city": city, "unit": unit, "days": days}


def answer(toolbox, *calls, errors=()):
    numbered = tuple(ToolCall(name, arguments, f"c{n}") for n, (name, arguments) in enumerate(calls))
    return asyncio.run(toolbox.answer(Action("", "", numbered, errors)))


def test_tool_schema_follows_function_signature():
    assert schema_of(weather) == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "How the weather is.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "unit": {"enum": ["C", "F"]},
                    "days": {"type": "integer"},
                    "detail": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["city"],
            },
        },
    }


def test_tool_functions_without_derivable_schema_raise():
    def bare(x):
        return x

    def strange(x: set[int]) -> None: ...
    def many(*x: int) -> None: ...

    for function, problem in ((bare, "needs an annotation"), (strange, "no JSON form"), (many, "accepted by name")):
        with pytest.raises(ValueError, match=problem):
            Toolbox(function)
    with pytest.raises(ValueError, match="two tools have the name weather"):
        Toolbox(weather, weather)


def test_tool_calls_return_results_or_errors_in_order():
    def broken(x: int) -> int:
        return 1 // x

    async def refused(x: int) -> str:
        raise ToolError("there is no such thing")

    def huge() -> str:
        return "x" * 10_000_000

    def odd() -> object:
        return {1, 2}.__class__

    box = Toolbox(weather, broken, refused, huge, odd, max_chars=100)
    messages = answer(
        box,
        ("weather", {"city": "Bern"}),
        ("broken", {"x": 0}),
        ("refused", {"x": 1}),
        ("huge", {}),
        ("odd", {}),
        ("wether", {}),
        ("weather", {}),
        ("weather", {"city": "Bern", "when": 1}),
        ("weather", {"city": 3}),
        ("weather", {"city": "Bern", "unit": "K"}),
        ("weather", {"city": "Bern", "days": True}),
        errors=("a call is not closed",),
    )
    texts = [message["content"] for message in messages]
    assert texts[0] == '{"city": "Bern", "unit": "C", "days": 1}'
    assert texts[1] == "error: broken raised ZeroDivisionError: integer division or modulo by zero"
    assert texts[2] == "error: there is no such thing"
    assert texts[3] == "x" * 100 + "... (9999900 more characters)"
    assert texts[4] == "<class 'set'>"
    assert texts[5].startswith("error: there is no tool 'wether': there is weather, broken")
    assert texts[6:11] == [
        "error: weather: missing city",
        "error: weather: no parameter 'when': it has city, unit, days, detail",
        "error: weather: city: 3 is not of type 'string'",
        "error: weather: unit: 'K' is not one of ['C', 'F']",
        "error: weather: days: True is not of type 'integer'",
    ]
    assert texts[11] == "error: a call is not closed"
    assert [message["role"] for message in messages] == ["tool"] * 12
    assert messages[1]["tool_call_id"] == "c1"


def test_hanging_tool_times_out_without_blocking_other_calls():
    gone = threading.Event()

    def hangs() -> None:
        gone.wait(3600)

    async def sleeps() -> None:
        await asyncio.sleep(3600)

    texts = [m["content"] for m in answer(Toolbox(hangs, sleeps, timeout=0.2), ("hangs", {}), ("sleeps", {}))]
    gone.set()
    assert texts == ["error: hangs took more than 0.2 s", "error: sleeps took more than 0.2 s"]


def test_invalid_tool_arguments_become_error_messages():
    def add(a: int, b: int) -> int:
        return a + b

    deep: list = []
    for _ in range(3000):
        deep = [deep]
    strange = [{(1, 2): 3}, int("f" * 5000, 16), deep, "\ud83d", {1: {2}}]
    for message in answer(Toolbox(add), *(("add", {"a": value, "b": "x"}) for value in strange)):
        assert message["content"].startswith("error: ")


def test_non_ascii_tool_results_are_not_escaped_in_json():
    def look() -> dict:
        """Look something up."""
        return {"城市": ["東京", "Zürich"]}

    [message] = answer(Toolbox(look), ("look", {}))
    assert message["content"] == '{"城市": ["東京", "Zürich"]}'
    assert text_of({"structuredContent": look()}) == message["content"]
    reply = Reply({"fields": look(), "id": 1}, None, False, {})
    assert "東京" in OpenEnvEnvironment._default_messages(SimpleNamespace(_max_chars=1000), reply)[0]["content"]
    assert _result_text(reply) == '{"fields": {"城市": ["東京", "Zürich"]}, "id": 1}'
