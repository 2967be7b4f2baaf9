"""Parsers of what others write: model output, network input, chat templates and files. None raises what it does not
document, whatever it reads. Chat templates are fuzzed in data/test_template_limits.py, special tokens alongside it."""

import asyncio
import json
import math
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from hypothesis import given, strategies as st

from forge.models.tokenizer import character_tokenizer
from forge.rewards.rules import CharacterMatch, ExactMatch, MathReward, ThinkingReward, final_answer
from forge_agents.dialects.chat import ChatDialect
from forge_agents.dialects.completions import CompletionsDialect
from forge_agents.messages import BadRequest, ModelRequest
from forge_envs import InfrastructureError, read_action
from forge_envs.calls import SYNTAXES
from forge_envs.content import text_of
from forge_envs.openenv import OpenEnvClient, OpenEnvEnvironment, OpenEnvError, serve
from forge_envs.openenv.wire import Reply, step_from_reply
from forge_envs.schemas import Parameters
from forge_sandbox.code_verifier import read_cases
from forge_weaver.table import ScoreTable
from tests.algorithms.test_degenerate import TOOLS, UNITS
from tests.forge_envs.openenv.counting import Counting

pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")  # pytest has its own filters

PLAIN = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
TOKENIZER = character_tokenizer()
TOKENIZER.chat_template = PLAIN

pieces = st.sampled_from(
    [*UNITS, "4", "5", "x", "and", " or ", "\ud800", "𝟒", "⁻¹", "\\text{", "frac", "1e400", "%", "∞"]
)
texts = st.lists(pieces, max_size=12).map("".join) | st.text(max_size=60)
names = st.text(max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)


def objects(*keys: str, **more):
    """Objects with some of these keys, any value in each."""
    return st.fixed_dictionaries({}, optional={key: values for key in keys} | more)


@pytest.mark.processes
@given(response=texts, target=texts)
def test_rewards_of_arbitrary_text_stay_in_range(response, target):
    assert MathReward()("", response, target) in (0.0, 1.0, None)
    assert ThinkingReward()("", response, target) in (0.0, 0.2, 1.0)
    assert ExactMatch()("", response, target) in (0.0, 1.0)
    assert 0.0 <= CharacterMatch()("", response, target) <= 1.0
    assert isinstance(final_answer(response), str | None)


@given(text=texts, syntax=st.sampled_from(SYNTAXES), truncated=st.booleans())
def test_tool_calls_parsed_from_arbitrary_text_are_well_typed(text, syntax, truncated):
    action = read_action(text, syntax, TOOLS, truncated=truncated)
    for call in action.calls:
        assert isinstance(Parameters(TOOLS[0]["function"]).mismatch(call.arguments), str)
        assert isinstance(call.name, str)
        assert isinstance(call.arguments, dict)
    assert len(action.calls) <= 64


@given(target=values.map(json.dumps) | texts)
def test_arbitrary_code_test_targets_raise_only_value_error(target):
    try:
        assert read_cases(target)
    except ValueError as error:
        assert str(error)  # noqa: PT017


MESSAGE = objects("role", "content", "name", "tool_calls", role=st.sampled_from(["user", "assistant", "x"]))
BODY = objects(
    *("model", "n", "stop", "stream", "stream_options", "max_tokens", "logprobs", "priority", "temperature", "top_p"),
    *("top_k", "seed", "stop_token_ids", "prompt", "echo", "best_of", "max_completion_tokens", "top_logprobs"),
    *("chat_template_kwargs", "user", "logit_bias", "messages", "response_format"),
    messages=st.lists(MESSAGE | values, max_size=3) | values,
    prompt=st.lists(st.integers(), max_size=4) | texts | values,
)


@given(body=BODY | values, chat=st.booleans())
def test_arbitrary_gateway_request_bodies_raise_only_bad_request(body, chat):
    dialect = ChatDialect() if chat else CompletionsDialect()
    try:
        assert isinstance(dialect.read(body), ModelRequest)
    except BadRequest as error:
        assert str(error)  # noqa: PT017


REPLY = objects("observation", "reward", "done", "metadata", observation=objects("messages", "tools", "rewritten"))


@given(reply=REPLY)
def test_arbitrary_environment_replies_give_step_or_infrastructure_error(reply):
    try:
        step = step_from_reply(Reply.read(reply))
    except InfrastructureError:
        return
    assert step.reward is None or math.isfinite(step.reward)
    assert all(isinstance(message["content"], str) for message in step.messages)


ACTION = objects(
    "type", "tool_name", "arguments", "text", "content", "calls", "errors", "truncated", "metadata", "more"
)


BLOCK = objects("type", "text", "resource", "uri", type=st.sampled_from(["text", "resource", "resource_link", "image"]))


@given(result=st.fixed_dictionaries({"content": st.lists(BLOCK, max_size=3)}, optional={"structuredContent": values}))
def test_arbitrary_tool_results_become_text(result):
    assert isinstance(text_of(result), str)


KIND = st.sampled_from(["reset", "step", "mcp", "state", "list_tools", "", "x"])
MCP = objects(
    "method", "params", "id", method=st.sampled_from(["tools/list", "tools/call", "openenv/session/create", "x"])
)
SENT = st.one_of(
    texts,
    values.map(json.dumps),
    st.fixed_dictionaries({"type": KIND, "data": ACTION | MCP | objects("seed", "episode_id", "task") | values}).map(
        json.dumps
    ),
)


@pytest.mark.costly
@given(messages=st.lists(SENT, max_size=8))
def test_served_environment_survives_arbitrary_messages(messages):
    async def main():
        async with serve(Counting) as url, aiohttp.ClientSession() as http:
            async with http.ws_connect(f"{url}/ws") as socket:
                for message in messages:
                    await socket.send_str(message.encode("utf-8", "replace").decode())
                    answer = await socket.receive(30)
                    assert answer.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.CLOSE)
                    if answer.type == aiohttp.WSMsgType.CLOSE:
                        break
                    assert isinstance(json.loads(answer.data)["type"], str)
            async with OpenEnvClient(url) as client, client.session() as session:
                assert not (await session.reset(seed=1)).done

    asyncio.run(main())


ANSWER = st.one_of(
    texts,
    values.map(json.dumps),
    st.just("[" * 100_000),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["observation", "state", "mcp", "error", "x"]), "data": REPLY | values}
    ).map(json.dumps),
)


@pytest.mark.costly
@given(answers=st.lists(ANSWER, min_size=1, max_size=6), mcp=st.booleans())
def test_environment_clients_survive_arbitrary_servers(answers, mcp):
    async def converse(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for _ in socket:
            await socket.send_str(answers[request.app["at"] % len(answers)].encode("utf-8", "replace").decode())
            request.app["at"] += 1
        return socket

    async def schema(_):
        return web.Response(text=answers[0].encode("utf-8", "replace").decode())

    async def main():
        app = web.Application()
        app["at"] = 0
        app.add_routes([web.get("/ws", converse), web.get("/schema", schema)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        client = OpenEnvClient(f"http://127.0.0.1:{port}", patience=0.05)
        environment = OpenEnvEnvironment(client, mcp=mcp)
        try:
            step = await environment.reset(None, seed=1)
            assert step.reward is None or math.isfinite(step.reward)
        except (InfrastructureError, OpenEnvError) as error:
            assert str(error)  # noqa: PT017
        finally:
            await environment.close()
            await client.close()
            await runner.cleanup()

    asyncio.run(main())


def small_table() -> ScoreTable:
    scores = np.arange(12.0).reshape(2, 3, 2)
    return ScoreTable(scores, ("a", "b"), labels=np.ones((2, 3)), answers=[["1"] * 3] * 2, prompts=["p", "q"])


@pytest.fixture(scope="module", params=[".npz"])
def saved(request, tmp_path_factory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("tables") / f"table{request.param}"
    small_table().save(path)
    return path, path.read_bytes()


@given(data=st.data())
def test_damaged_weaver_score_table_error_names_file(saved, data):
    path, whole = saved
    damaged = bytearray(whole)
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=6)):
        damaged[at] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(damaged)[: data.draw(st.integers(0, len(whole)) | st.just(len(whole)))])
    try:
        assert len(ScoreTable.load(path)) >= 1
    except ValueError as error:
        assert path.name in str(error)  # noqa: PT017
