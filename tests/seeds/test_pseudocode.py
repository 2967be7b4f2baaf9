"""The pseudocode of the front page and the talk, on real services."""

import asyncio
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from forge.actors import DatasetActor, PolicyActor, ReplayBuffer, RewardActor, Trainer
from forge.engines.weights import read_checkpoint
from forge.losses import ReinforceLoss
from forge.models import build_small_model
from forge.runtime.controller import run
from forge.runtime.store import VersionStore
from forge.types import Episode
from forge_compat import store as ts
from tests.seeds import printed

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(printed.MISSING, reason="the documents are not alongside the checkout"),
]
DATA = {"task": "apps.toys.words:Reverse", "difficulty": [2, 3], "prompt_template": "{question}>"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    sizes = {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1, "max_positions": 32}
    return build_small_model(tmp_path_factory.mktemp("model"), seed=0, alphabet="abcdefghijklmnopqrstuvwxyz>", **sizes)


@pytest.fixture
def store():
    store = VersionStore.create()
    yield store
    store.close()


async def start(model, store):
    return await asyncio.gather(
        DatasetActor.as_local(model, **DATA),
        PolicyActor.options(num_replicas=2).as_service(model, store=store, max_tokens=6),
        RewardActor.as_local(["CharacterMatch"]),
        ReplayBuffer.as_local(64),
        Trainer.as_actor(model, loss=ReinforceLoss(), store=store, seq_len=256),
    )


@pytest.mark.parametrize("name", [printed.FRONT, pytest.param(printed.TALK, marks=pytest.mark.full)])
async def test_pseudocode_episode_code_returns_scored_episode(model, store, name):
    code = "\n".join(
        printed.block(
            name,
            "async def generate_episode(",
            "Episode(response, reward_value)" if name == printed.TALK else "reward=reward_value)",
        )
    )
    code = code if name == printed.TALK else code + "\n    )\n"

    dataloader, policy, reward, buffer, _ = await start(model, store)
    await printed.run(code, Episode=Episode)["generate_episode"](dataloader, policy, reward, buffer)
    (episode,) = await buffer.sample.route(0, 1)
    assert 0.0 <= episode.reward <= 1.0


@pytest.mark.full
async def test_pseudocode_synchronous_loop_publishes_versions(model, store):
    """As printed: nothing but the trainer's step comes before the fanout of its version."""
    episode = "\n".join(printed.block(printed.TALK, "async def generate_episode(", "Episode(response, reward_value)"))
    loop = "\n".join(printed.block(printed.TALK, "async def synchronous_rl(", "version += 1"))

    parts = _, policy, _, buffer, trainer = await start(model, store)
    names = printed.run(episode, Episode=Episode)

    async def generate_episode(_):
        await names["generate_episode"](*parts[:4])

    loop_names = printed.run(loop, generate_episode=generate_episode, buffer=buffer, trainer=trainer, policy=policy)
    training = asyncio.create_task(loop_names["synchronous_rl"](4))
    async with asyncio.timeout(120):
        while (await policy.generate.route("abc>")).version < 3 and not training.done():
            await asyncio.sleep(0.05)
    training.cancel()
    await asyncio.gather(training, return_exceptions=True)
    assert max(store.versions("policy")) >= 3


async def test_pseudocode_asynchronous_loop_trains_three_steps(model, store):
    loop = "\n".join(
        printed.block(printed.TALK, "async def async_rl_loop(", "await asyncio.gather(*rollouts, training)")
    )
    episode = "\n".join(printed.block(printed.TALK, "async def generate_episode(", "Episode(response, reward_value)"))

    parts = _, policy, _, buffer, trainer = await start(model, store)
    generate_episode = printed.run(episode, Episode=Episode)["generate_episode"]
    steps = []

    async def continuous_rollouts():
        while len(steps) < 3:
            await generate_episode(*parts[:4])

    async def continuous_training():
        for version in range(3):
            await trainer.train_step.route(await buffer.sample.route(version, 4))
            await policy.update_weights.fanout(version + 1)
            steps.append(version)

    names = {
        "asyncio": asyncio,
        "continuous_rollouts": continuous_rollouts,
        "continuous_training": continuous_training,
    }
    await printed.run(loop, **names)["async_rl_loop"](2)
    assert steps == [0, 1, 2]


def test_pseudocode_service_options_error_names_missing_part(model, store):
    """Sixteen replicas of eight GPUs: without a model and GPUs the error says what is missing."""
    code = "\n".join(printed.block(printed.TALK, "policy = PolicyActor.options(", ").as_service()"))
    with pytest.raises(TypeError, match="missing a required argument: 'model'"):
        printed.run(code, PolicyActor=PolicyActor)
    with pytest.raises(
        ValueError, match=r"procs = 8 splits one model over 8 processes .* set generator.engine to vllm"
    ):
        printed.run(code.replace("as_service()", "as_service(model)"), PolicyActor=PolicyActor, model=model)

    async def main():
        resources = {"num_replicas": 2, "hosts": 1}
        policy = await PolicyActor.options(**resources).as_service(model, store=store, max_tokens=4)
        store.put("policy", dict(read_checkpoint(Path(model))), 1)
        lines = printed.block(printed.TALK, "response = await", "await policy.update.fanout(version)")
        body = "\n".join(lines).replace("await\npolicy", "await policy")
        code = f"async def use():\n{textwrap.indent(body, '    ')}\n    return response"
        assert "policy.update.fanout(version)" in code
        response = await printed.run(code, policy=policy, prompt="abc>", version=1)["use"]()
        assert response.version == 0
        assert {(await policy.generate.route("abc>")).version for _ in range(2)} == {1}
        await policy.shutdown()

    run(main())


def test_pseudocode_store_calls_round_trip_a_tensor(store):
    lines = printed.block(printed.TALK, 'await ts.put("policy_v42"', 'await ts.get("policy_v42"')
    ts.use(store)
    value = torch.arange(6.0)
    code = "async def use(dtensor):\n" + textwrap.indent("\n".join(lines), "    ")
    asyncio.run(printed.run(code, ts=ts)["use"](value))
    assert torch.equal(asyncio.run(ts.get("policy_v42")), torch.arange(6.0))


def test_pseudocode_monarch_example_runs(tmp_path):
    """Monarch's own example, with fewer processes; and its actor as a component."""
    lines = printed.block(printed.TALK, "# Spawn 8 processes", "trainers.train.call(step=0).get()")
    code = "\n".join(lines).replace('{"gpus": 8}', '{"gpus": 2}').replace("...", "return step + 1")
    code = re.sub(r"trainers.train.call\(step=0\).get\(\).*", "answer = trainers.train.call(step=0).get()", code)
    (tmp_path / "monarch_example.py").write_text(
        f"from monarch.actor import Actor, endpoint, this_host\n{code}\nassert [v for _, v in answer] == [1, 1]\n"
    )
    done = subprocess.run(
        [sys.executable, "monarch_example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
