"""The loop of the documentation, as printed there, on real services."""

import asyncio
import re
from pathlib import Path

import pytest

from forge.actors import DatasetActor, Generator, ReplayBuffer, RewardActor, Trainer
from forge.losses import ReinforceLoss
from forge.types import Episode, Group

OVERVIEW = (Path(__file__).parents[2] / "docs/architecture.md").read_text()

pytestmark = pytest.mark.processes

DATA = {"task": "apps.toys.words:Reverse", "difficulty": [2, 3], "prompt_template": "{question}>"}


async def start(model, store):
    return await asyncio.gather(
        DatasetActor.options(share="helpers").as_service(model, **DATA),
        Generator.options(num_replicas=2).as_service(model, store=store, max_tokens=6),
        RewardActor.options(share="helpers").as_service(["CharacterMatch"]),
        ReplayBuffer.options(share="helpers").as_service(64),
        Trainer.as_actor(model, loss=ReinforceLoss(), store=store, optimizer={"learning_rate": 1e-3}, seq_len=256),
    )


@pytest.mark.full
async def test_overview_page_rollout_and_training_loops_run_together(model, store):
    (code,) = re.findall(r"```text\n(async def rollout.*?)```", OVERVIEW, re.DOTALL)

    dataset, policy, reward, buffer, trainer = await start(model, store)
    names = {"dataset": dataset, "policy": policy, "reward": reward, "buffer": buffer, "trainer": trainer}
    names |= {"Group": Group, "Episode": Episode, "batch_size": 2}
    exec(code, names)
    for version in range(2):
        names["version"] = version
        await asyncio.gather(names["rollout"](), names["rollout"](), names["training"]())
    assert (await policy.generate.route("abc>")).version == 2


@pytest.mark.full
async def test_published_trainer_weights_reach_every_generator_replica(model, store):
    _, policy, _, _, trainer = await start(model, store)
    before = await policy.generate.route("abcd>", temperature=0.0)
    episodes = [Episode(prompt_ids=before.prompt_ids, response_ids=[5, 6, 7, 1], reward=1.0)]
    for _ in range(60):
        await trainer.train_step.route(episodes)
    await trainer.push_weights.call(1)
    assert await policy.update_weights.fanout(1) == [1, 1]
    after = [await policy.generate.route("abcd>", temperature=0.0) for _ in range(2)]
    assert [completion.token_ids for completion in after] == [[5, 6, 7, 1]] * 2
    assert {version for completion in after for version in completion.versions} == {1}
    assert [completion.finish for completion in after] == ["stop", "stop"]
    with pytest.raises(KeyError, match="version 9 is not in the store; it holds"):
        await policy.update_weights.fanout(9)
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        await policy.generate.route("abcd>", max_tokens=0)
