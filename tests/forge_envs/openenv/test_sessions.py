"""Our client against our server: everything over real sockets."""

import asyncio

import aiohttp
import pytest

from forge_envs import Action, InfrastructureError, ToolCall
from forge_envs.openenv import CapacityError, OpenEnvClient, OpenEnvEnvironment, OpenEnvError, serve

from .counting import Counting

pytestmark = pytest.mark.costly


def turn(text, *calls):
    return Action(text, text, calls)


def with_client(work, client=None, **settings):
    async def main():
        async with serve(Counting, **settings) as url, OpenEnvClient(url, **(client or {})) as opened:
            return await work(opened)

    return asyncio.run(main())


@pytest.mark.parametrize("ending", ["end", "cut", "unscored"])
def test_openenv_remote_steps_equal_local_steps(ending):
    turns = [turn("one"), turn("", ToolCall("add", {"a": 1, "b": 2}, "c1")), turn("rewrite"), turn(ending)]

    async def play(env):
        steps = [await env.reset({"level": 3}, seed=7), *[await env.step(action) for action in turns]]
        await env.close()
        return steps

    here = asyncio.run(play(Counting()))
    there = with_client(lambda client: play(OpenEnvEnvironment(client)))
    if ending == "cut":  # a set has no JSON form
        assert there[-1].info.pop("where") == str(here[-1].info.pop("where"))
    assert there == here


def test_concurrent_openenv_sessions_are_independent():
    async def work(client):
        async def play(number):
            env = OpenEnvEnvironment(client)
            said = []
            for episode in range(2):
                await env.reset(None, seed=100 * episode + number)
                for _ in range(5):
                    said += [(await env.step(turn(f"by {number}"))).messages[0]["content"]]
            await env.close()
            return said

        return await asyncio.gather(*map(play, range(32)))

    Counting.made = 0
    for number, said in enumerate(with_client(work)):
        assert said == [f"turn {n} of {100 * e + number}: by {number}" for e in range(2) for n in range(1, 6)]
    assert Counting.made == 64


def test_openenv_session_limit_holds_and_sessions_are_closed():
    async def work(client):
        async def play(number):
            async with client.session() as session:
                await session.reset(seed=number)
                return (await session.step({"text": "x"})).observation["messages"][0]["content"]

        return await asyncio.gather(*map(play, range(20)))

    Counting.made = Counting.closed = 0
    assert with_client(work, {"sessions": 4}, max_sessions=4) == [f"turn 1 of {number}: x" for number in range(20)]
    assert Counting.made == Counting.closed == 20


def test_late_openenv_reply_is_not_used_for_next_step():
    async def work(client):
        async with client.session() as session:
            await session.reset(seed=1)
            with pytest.raises(InfrastructureError, match=r"did not answer step within 0\.5 s"):
                await session.step({"text": "hang"})
            with pytest.raises(InfrastructureError, match="has ended"):
                await session.step({"text": "x"})
        async with client.session() as session:
            await session.reset(seed=2)
            await asyncio.sleep(0.6)  # the late reply comes
            return [(await session.step({"text": "x"})).observation["messages"][0]["content"] for _ in range(3)]

    assert with_client(work, {"timeout": 0.5}) == [f"turn {n} of 2: x" for n in (1, 2, 3)]


def test_openenv_server_at_session_limit_error_names_setting():
    async def work(client):
        async with client.session():
            with pytest.raises(CapacityError, match=r"takes 1 sessions.*max_concurrent_envs"):
                await client.acquire()

    with_client(work, {"patience": 0.3}, max_sessions=1)


def test_openenv_session_stays_open_after_environment_error():
    async def work(client):
        async with client.session() as session:
            with pytest.raises(OpenEnvError, match="no episode has started"):
                await session.step({"text": "x"})
            await session.reset(seed=1)
            with pytest.raises(OpenEnvError, match=r"EXECUTION_ERROR: KeyError: 'nothing here'"):
                await session.step({"text": "raise"})
            for bad in ({}, {"text": 3}, {"text": "x", "speed": 1}, {"text": "x", "calls": ["add"]}):
                with pytest.raises(OpenEnvError, match="VALIDATION_ERROR"):
                    await session.step(bad)
            return (await session.step({"text": "x"})).observation["messages"][0]["content"]

    assert with_client(work) == "turn 2 of 1: x"


async def test_unreachable_openenv_server_raises():
    async with OpenEnvClient("http://127.0.0.1:9", patience=0.2) as client:
        with pytest.raises(InfrastructureError, match="no session with http"):
            await client.acquire()
        with pytest.raises(InfrastructureError, match="/health"):
            await client.health()


async def test_invalid_openenv_messages_raise():
    async with serve(Counting) as url, aiohttp.ClientSession() as http, http.ws_connect(f"{url}/ws") as socket:

        async def said(text):
            await socket.send_str(text)
            return (await socket.receive_json())["data"]["code"]

        assert await said("{") == "INVALID_JSON"
        assert await said("[1]") == "VALIDATION_ERROR"
        assert await said('{"type": "reset", "data": 3}') == "VALIDATION_ERROR"
        assert await said('{"type": "reset", "data": {"seed": "x"}}') == "VALIDATION_ERROR"
        assert await said('{"type": "dance"}') == "UNKNOWN_TYPE"
