"""A question with tools behind the server, for our client and for OpenEnv's, and what `openenv validate` asks."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import aiohttp
import pytest

from forge.envs import Action, Toolbox, ToolCall, ToolEnvironment
from forge.types import Prompt, Sample
from forge_envs.openenv import OpenEnvClient, OpenEnvEnvironment, OpenEnvError, serve

from .counting import Counting


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
@pytest.mark.parametrize("mcp", [False, True])
def test_an_episode_begins_with_a_question_in_any_form(task, question, reward, mcp):
    async def work(client):
        env = OpenEnvEnvironment(client, mcp=mcp)
        first = await env.reset(task, seed=0)
        assert question in str(first.messages)
        assert [tool["function"]["name"] for tool in first.tools] == ["add"]
        called = await env.step(Action("", "", (ToolCall("add", {"a": 2, "b": 3}),)))
        assert called.messages[0]["content"] == "5"
        return None if mcp else await env.step(Action("5", "5"))  # with MCP tools a turn without a call ends it here

    last = on_client(work)
    assert mcp or (last.reward, last.terminated) == (reward, True)


@pytest.mark.parametrize("task", [None, 7, {}, {"answer": "5"}, {"question": ""}, {"question": ["a"]}])
def test_a_task_without_a_question_says_what_one_is(task):
    async def work(client):
        with pytest.raises(OpenEnvError, match="a task must be a question, or a mapping with a question and an answer"):
            await OpenEnvEnvironment(client).reset(task, seed=0)

    on_client(work, task=lambda seed: None)


def test_tools_are_listed_before_an_episode_where_every_episode_has_them():
    async def work(client):
        async with client.session() as session:
            tools = await session.list_tools()
        async with aiohttp.ClientSession() as http:

            async def ask(method, **params):
                body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
                async with http.post(f"{client.url}/mcp", json=body) as reply:
                    return await reply.json()

            name = (await ask("openenv/session/create"))["result"]["session_id"]
            listed = await ask("tools/list", session_id=name)
        return tools, listed

    tools, listed = on_client(work)
    assert [tool["function"]["name"] for tool in tools] == ["add"]
    assert listed["result"]["tools"][0]["inputSchema"]["required"] == ["a", "b"]


async def criteria(url):
    """The conditions of `openenv validate --url` (openenv 0.10), by name."""
    async with aiohttp.ClientSession() as http:

        async def fetch(path):
            async with http.get(url + path) as reply:
                return await reply.json() if reply.status == 200 else {}

        async with http.post(f"{url}/mcp", json={}) as reply:
            mcp = reply.status == 200 and (await reply.json()).get("jsonrpc") == "2.0"
        openapi, metadata, schema = await fetch("/openapi.json"), await fetch("/metadata"), await fetch("/schema")
        return {
            "openapi_version_available": openapi.get("info", {}).get("version", "").startswith("1."),
            "health_endpoint": (await fetch("/health")).get("status") == "healthy",
            "metadata_endpoint": all(isinstance(metadata.get(name), str) for name in ("name", "description")),
            "schema_endpoint": all(isinstance(schema.get(name), dict) for name in ("action", "observation", "state")),
            "mcp_endpoint": mcp,
            "mode_endpoint_consistency": {"/reset", "/step", "/state"} <= openapi.get("paths", {}).keys(),
        }


@pytest.mark.parametrize("environment", [make, Counting])
def test_a_server_meets_what_is_validated(environment):
    found = on_client(lambda client: criteria(client.url), environment)
    assert [name for name, met in found.items() if not met] == []


@pytest.mark.processes
def test_the_validator_of_the_package_agrees():
    pytest.importorskip("openenv")

    async def work(client):
        command = [sys.executable, "-m", "openenv.cli", "validate", "--url", client.url, "--json"]
        return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)

    done = on_client(work)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["passed"]


@pytest.mark.processes
def test_clients_of_the_package_reset_it():
    pytest.importorskip("openenv")
    from openenv.core import GenericEnvClient
    from openenv.core.mcp_client import MCPToolClient

    async def work(client):
        async with MCPToolClient(base_url=client.url) as tools:
            assert [tool.name for tool in await tools.list_tools()] == ["add"]
            await tools.reset(task="add 2 and 3", seed=0)
            assert await tools.call_tool("add", a=2, b=3) == "5"
        async with GenericEnvClient(base_url=client.url) as generic:
            first = await generic.reset(question="add 2 and 3", answer="5")
            assert first.observation["messages"][-1]["content"] == "add 2 and 3"
            return await generic.step({"text": "5"})

    assert on_client(work).reward == 1.0
