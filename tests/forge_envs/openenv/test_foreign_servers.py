"""Servers that are not ours: other schemas, other observations, and what breaks the wire's rules."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from forge_envs import Action, InfrastructureError, ToolCall
from forge_envs.openenv import OpenEnvClient, OpenEnvEnvironment

STATE = {"type": "state", "data": {}}


@asynccontextmanager
async def server(answer, properties=None, about=None):
    """Each message is answered by what `answer(type, data)` gives: a message, text, or None, which ends the session."""

    async def session(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            asked = json.loads(message.data)
            if asked["type"] == "close":
                break
            said = STATE if asked["type"] == "state" else answer(asked["type"], asked.get("data"))
            if said is None:
                break
            await socket.send_str(said if isinstance(said, str) else json.dumps(said))
        return socket

    async def schema(_):
        known = {"title": "Action", "properties": properties or {}, "required": list(properties or {})}
        return web.json_response({"action": known if about is None else about})

    app = web.Application()
    app.add_routes([web.get("/ws", session), web.get("/schema", schema)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


def observed(observation, reward=None, done=False, **more):
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done, **more}}


def played(texts, answer, properties=None, **settings):
    """The step of each turn."""

    async def main():
        async with server(answer, properties) as url, OpenEnvClient(url) as client:
            env = OpenEnvEnvironment(client, **settings)
            first = await env.reset({"level": 2}, seed=5)
            return [first, *[await env.step(Action(text, text)) for text in texts]]

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("no json", "answered reset with 'no json'"),
        ("[]", "answered reset with"),
        ({"type": "state", "data": {}}, "with a message of type 'state'"),
        ({"type": "observation", "data": [1]}, "answered reset with"),
        (None, "closed the connection instead of answering reset"),
    ],
)
async def test_openenv_response_violating_protocol_ends_session(said, why):
    async with server(lambda kind, data: said) as url, OpenEnvClient(url) as client, client.session() as session:
        with pytest.raises(InfrastructureError, match=why):
            await session.reset()
        assert session.lost


def test_openenv_turn_text_becomes_single_field_action():
    asked = []

    def answer(kind, data):
        asked.append((kind, data))
        return observed({"text": "well", "metadata": {}, "extra": None}, 1.0)

    number = {"move": {"type": "integer"}, "metadata": {"type": "object"}}
    steps = played([" 4 ", "left"], answer, number)
    assert asked == [("reset", {"seed": 5, "level": 2}), ("step", {"move": 4})]
    assert [step.messages[0]["content"] for step in steps] == [
        "well",
        "well",
        "error: move: 'left' is not of type 'integer'",
    ]
    asked.clear()
    played(["left"], answer, {"word": {"type": "string"}})
    assert asked[1] == ("step", {"word": "left"})


def test_truncated_turn_is_not_sent_as_openenv_action():
    asked = []

    def answer(kind, data):
        asked.append(kind)
        return observed({"text": "well"})

    async def main():
        async with server(answer, {"word": {"type": "string"}}) as url, OpenEnvClient(url) as client:
            env = OpenEnvEnvironment(client)
            await env.reset({}, seed=5)
            return await env.step(Action("4", "4", truncated=True))

    assert "was cut at its limit" in asyncio.run(main()).messages[0]["content"]
    assert asked == ["reset"]


def test_custom_openenv_conversions_are_used():
    asked = []

    def answer(kind, data):
        asked.append(data)
        return observed({"board": "...x"}, 0.5)

    def to_action(action):
        if action.text != "go":
            raise ValueError("say go")
        return {"run": True}

    steps = played(
        ["go", "stop"],
        answer,
        to_action=to_action,
        to_messages=lambda reply: [{"role": "user", "content": reply.observation["board"].upper()}],
        to_reset=lambda task, seed: {"seed": seed + task["level"]},
    )
    assert asked == [{"seed": 7}, {"run": True}]
    assert [step.messages[0]["content"] for step in steps] == ["...X", "...X", "error: say go"]
    assert [step.reward for step in steps] == [0.0, 0.5, 0.0]


def test_openenv_rejected_action_error_is_shown_to_policy():
    def answer(kind, data):
        if kind == "step" and data["word"] != "UP":
            data = {"code": "VALIDATION_ERROR", "message": "Invalid message", "errors": [{"msg": "UP or DOWN"}]}
            return {"type": "error", "data": data}
        return observed({"text": "fine"}, 1.0)

    steps = played(["sideways", "UP"], answer, {"word": {"$ref": "#/x"}})
    assert "UP or DOWN" in steps[1].messages[0]["content"]
    assert (steps[1].reward, steps[2].reward) == (0.0, 1.0)


@pytest.mark.parametrize("reward", ["much", float("nan"), 10**400])
def test_invalid_openenv_reward_raises_infrastructure_error(reward):
    with pytest.raises(InfrastructureError, match=r"reply\.reward: .* is not"):
        played(
            ["x"],
            lambda kind, data: observed({}, reward if kind == "step" else None),
            {"word": {"type": "string"}},
            to_action=lambda action: {"word": action.text},
        )


@pytest.mark.parametrize("word", ["is_error", "isError"])
def test_mcp_error_result_becomes_error_message(word):
    def answer(kind, data):
        if kind == "mcp":
            return {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "result": {"tools": []}}}
        return observed({} if kind == "reset" else {"result": data["arguments"]})

    async def main():
        async with server(answer) as url, OpenEnvClient(url) as client:
            env = OpenEnvEnvironment(client, mcp=True)
            await env.reset(None, seed=0)
            result = {"content": [{"type": "text", "text": "a"}], word: True}
            return await env.step(Action("", calls=(ToolCall("look", result),)))

    assert asyncio.run(main()).messages[0]["content"] == "error: a"
