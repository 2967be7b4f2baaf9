"""Against the `openenv` package: its servers by our client, our server by its clients."""

import asyncio
import sys
from pathlib import Path

import pytest

from forge_envs import Action, ToolCall
from forge_envs.openenv import LocalServer, OpenEnvClient, OpenEnvEnvironment, OpenEnvError, serve

from .counting import ADD, Counting

pytestmark = pytest.mark.processes

pytest.importorskip("openenv")
ROOT = Path(__file__).parents[3]
UVICORN = [sys.executable, "-m", "uvicorn", "--port", "{port}"]


def on_server(app, work, sessions=32, cwd=ROOT, **client):
    async def main():
        env = {"SESSIONS": str(sessions)}
        async with (
            await LocalServer.start([*UVICORN, app], cwd=cwd, env=env) as server,
            OpenEnvClient(server.url, **client) as opened,
        ):
            return await work(opened)

    return asyncio.run(main())


def test_packaged_openenv_environment_plays_episodes():
    async def work(client):
        assert await client.health() == "healthy"
        assert "step" in (await client.schema())["action"]["properties"]

        async def play(seed):
            env = OpenEnvEnvironment(client)
            first = await env.reset({"start": 1}, seed=seed)
            wrong = await env.step(Action("left"))
            last = [await env.step(Action("1")), await env.step(Action("1"))][-1]
            await env.close()
            return first.messages[0]["content"], wrong.reward, last.reward, last.terminated

        played = await asyncio.gather(*map(play, range(32)))
        assert played == [(f'{{"at": 1, "seed": {seed}}}', 0.0, 0.5, True) for seed in range(32)]
        async with client.session() as session:
            await session.reset(episode_id="mine")
            with pytest.raises(OpenEnvError, match="EXECUTION_ERROR: stuck"):
                await session.step({"step": 0})
            with pytest.raises(OpenEnvError, match=r"VALIDATION_ERROR.*valid integer"):
                await session.step({"step": "x"})
            await session.step({"step": 1})
            assert await session.state() == {"episode_id": "mine", "step_count": 1}

    on_server("tests.forge_envs.openenv.package_server:walk", work)


def test_packaged_openenv_environment_tools_can_be_called():
    async def work(client):
        env = OpenEnvEnvironment(client, mcp=True)
        tools = (await env.reset(None, seed=0)).tools
        assert [tool["function"]["name"] for tool in tools] == ["double"]
        assert tools[0]["function"]["parameters"]["required"] == ["number"]
        calls = (ToolCall("double", {"number": 4}), ToolCall("double", {"number": "x"}), ToolCall("halve", {}))
        said = [message["content"] for message in (await env.step(Action("", calls=calls))).messages]
        assert said[0] == "8"
        assert all(text.startswith("error: ") for text in said[1:])

    on_server("tests.forge_envs.openenv.package_server:tools", work)


def test_openenv_package_client_plays_episodes_on_forge_server():
    from openenv import GenericEnvClient

    async def main():
        async with serve(Counting, max_sessions=33) as url:

            async def play(seed):
                async with GenericEnvClient(base_url=url) as client:
                    first = await client.reset(seed=seed, task="sums")
                    assert first.observation["tools"] == [ADD]
                    said = [first.observation["messages"][0]["content"]]
                    step = await client.step({"text": "x"})
                    assert (step.reward, step.done) == (1.0, False)
                    tool = await client.step({"text": "", "calls": [{"name": "add", "arguments": {"a": 1, "b": 2}}]})
                    assert tool.observation["messages"][0]["content"] == "3"
                    with pytest.raises(RuntimeError, match="nothing here"):
                        await client.step({"text": "raise"})
                    last = await client.step({"text": "cut"})
                    assert last.done
                    assert last.metadata["truncated"]
                    assert (await client.state())["step_count"] == 3
                    return said[0]

            return await asyncio.gather(*map(play, range(32)))

    assert asyncio.run(main()) == [f"task sums, seed {seed}" for seed in range(32)]
