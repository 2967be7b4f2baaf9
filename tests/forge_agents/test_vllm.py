"""vLLM behind the gateway: exact tokens with the log-probabilities of a plain forward pass, and an account that adds
up."""

import asyncio
import json
from importlib.util import find_spec

import pytest
import torch
from openai import AsyncOpenAI
from transformers import Qwen3Config, Qwen3ForCausalLM

from forge.actors import Generator
from forge.runtime.controller import run
from forge_agents.gateway import Gateway
from forge_agents.policies import Policy
from forge_agents.record import EXCLUSIONS
from forge_agents.settings import SessionSettings
from forge_envs.dialogue import Dialogue
from forge_http.web import bind_socket
from tests.forge_envs.core.conftest import bpe  # noqa: F401

pytestmark = [
    pytest.mark.processes,
    pytest.mark.full,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here: make test-vllm has it"),
]

SCHEMA = {
    "type": "object",
    "properties": {"right": {"type": "boolean"}},
    "required": ["right"],
    "additionalProperties": False,
}


async def wait_until(condition, seconds=30.0):
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.05)


async def streamed(client, messages, **options):
    """The text of a streamed answer."""
    events = await client.chat.completions.create(model="policy", messages=messages, stream=True, **options)
    return "".join([event.choices[0].delta.content or "" async for event in events])


async def converse(client):
    """A conversation of every kind of request. A client hangs up within the last answer."""
    messages = [{"role": "user", "content": "12+34"}]
    reply = await client.chat.completions.create(model="policy", messages=messages, logprobs=True, top_logprobs=2)
    assert all(len(token.top_logprobs) == 2 for token in reply.choices[0].logprobs.content)
    messages += [
        {"role": "assistant", "content": reply.choices[0].message.content},
        {"role": "user", "content": "sure?"},
    ]
    text = await streamed(client, messages)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "again"}]
    pair = await client.chat.completions.create(model="policy", messages=messages, n=2)
    assert len(pair.choices) == 2
    stopped = await streamed(client, messages, stop=[text[0]])
    assert text[0] not in stopped
    schema = {"type": "json_schema", "json_schema": {"name": "judgement", "schema": SCHEMA}}
    answer = await client.chat.completions.create(model="policy", messages=messages, response_format=schema)
    assert isinstance(json.loads(answer.choices[0].message.content)["right"], bool)
    events = await client.chat.completions.create(model="policy", messages=messages, stream=True)
    async for _ in events:
        break
    await events.close()


@pytest.fixture
def model(bpe, tmp_path):  # noqa: F811
    """A model with random weights, saved in `tmp_path`, with a tokenizer that llguidance takes."""
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=len(bpe),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=128,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=bpe.eos_token_id,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    bpe.save_pretrained(tmp_path)
    return model


def test_gateway_records_every_token_vllm_samples(bpe, model, tmp_path):  # noqa: F811

    async def main():
        policy = await Generator.as_service(str(tmp_path), engine="vllm", slots=8)
        dialogue = Dialogue(bpe, template="chatml")
        gateway = Gateway({"policy": Policy(policy, dialogue, sampling={"temperature": 0.8})})
        async with gateway.listen(bind_socket("127.0.0.1", 0)):
            access = gateway.open(SessionSettings(max_tokens=400, max_turn_tokens=24, seed=1))
            async with AsyncOpenAI(base_url=f"{access.url}/v1", api_key=access.key, max_retries=0) as client:
                await converse(client)

            async def is_idle():
                return (await policy.stats.route())["running"] == 0

            await wait_until(is_idle)
            return await gateway.close(access.key)

    record = run(main())
    tree = record.tree("policy")
    assert len(tree.runs) >= 6
    for turn in tree.runs:
        tokens = tree.tokens(turn)
        drawn = turn.completion
        assert tokens[-len(drawn.token_ids) :] == drawn.token_ids
        assert set(drawn.versions) == {0}
        if turn.is_constrained:
            continue
        with torch.no_grad():
            logprobs = (model(torch.tensor([tokens])).logits[0].float() / 0.8).log_softmax(-1)
        places = range(len(tokens) - len(drawn.token_ids) - 1, len(tokens) - 1)
        expected = [logprobs[place, tokens[place + 1]].item() for place in places]
        assert drawn.logprobs == pytest.approx(expected, abs=1e-5)
    certificate = record.episode("policy", 1.0).info["certificate"]
    assert certificate["sampled"] == certificate["trained"] + sum(certificate.get(name, 0) for name in EXCLUSIONS)
    assert certificate["constrained"] > 0
