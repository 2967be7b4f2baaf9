"""A question with tools behind the server, for our client and for OpenEnv's."""

from __future__ import annotations  # tools whose annotations are text have schemas too

import asyncio

import pytest

from forge.types import Prompt, Sample
from forge_envs import Action, Toolbox, ToolCall, ToolEnvironment
from forge_envs.openenv import OpenEnvClient, OpenEnvEnvironment, serve


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def make():
    return ToolEnvironment(Toolbox(add), lambda prompt, response, target: float(response == target), system="Be brief.")


def on_client(work, environment=make, **settings):
    async def main():
        async with serve(environment, **settings) as url, OpenEnvClient(url) as client:
            return await work(client)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("task", "question", "reward"),
    [
        ("add 2 and 3", "add 2 and 3", 0.0),
        ({"question": "add 2 and 3", "answer": "5"}, "add 2 and 3", 1.0),
        ({"prompt": "add 2 and 3", "target": "5"}, "add 2 and 3", 1.0),
        ({"problem": "2 + 3 ?", "answer": 5, "level": 1}, "2 + 3 ?", 1.0),
        ({"task": "add 2 and 3"}, "add 2 and 3", 0.0),
        (Sample(Prompt("add 2 and 3", ()), "5"), "add 2 and 3", 1.0),
    ],
)
def test_openenv_served_tools_accept_task_in_any_form(task, question, reward):
    async def work(client):
        env = OpenEnvEnvironment(client, mcp="answer" in task)  # which changes nothing for a server of this library
        first = await env.reset(task, seed=0)
        assert first.messages[-1]["role"] == "user"
        assert question in str(first.messages)
        assert [tool["function"]["name"] for tool in first.tools] == ["add"]
        called = await env.step(Action("", "", (ToolCall("add", {"a": 2, "b": 3}),)))
        assert called.messages[0]["content"] == "5"
        return await env.step(Action("5", "5"))

    last = on_client(work)
    assert (last.reward, last.terminated) == (reward, True)
