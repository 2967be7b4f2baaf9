"""The loops of the documentation, as printed there, on real services."""

import asyncio
import re
from pathlib import Path

import pytest

from forge.actors import DatasetActor, Generator, ReplayBuffer, RewardActor, Trainer
from forge.losses import ReinforceLoss, SimpleGRPOLoss
from forge.runtime.controller import run
from forge.types import Episode, Group

OVERVIEW = (Path(__file__).parents[2] / "docs/architecture.md").read_text()

pytestmark = pytest.mark.processes

DATA = {"task": "apps.toys.words:Reverse", "difficulty": [2, 3], "prompt_template": "{question}>"}


async def start(model, store, loss, trainer_procs=1):
    return await asyncio.gather(
        DatasetActor.options(share="helpers").as_service(model, **DATA),
        Generator.options(num_replicas=2).as_service(model, store=store, max_tokens=6),
        RewardActor.options(share="helpers").as_service(["CharacterMatch"]),
        ReplayBuffer.options(share="helpers").as_service(64),
        Trainer.options(procs=trainer_procs).as_actor(
            model, loss=loss, store=store, optimizer={"learning_rate": 1e-3}, seq_len=256
        ),
    )


async def generate_episode(dataloader, policy, reward, replay_buffer):
    # Sample a prompt
    prompt, target = await dataloader.sample.route()

    # Generate response
    response = await policy.generate.route(prompt)

    # Score the response
    reward_value = await reward.evaluate_response.route(prompt=prompt, response=response.text, target=target)

    # Store for training
    await replay_buffer.add.route(
        Episode(prompt_ids=response.prompt_ids, response_ids=response.token_ids, reward=reward_value)
    )


@pytest.mark.full
def test_documented_synchronous_loop_updates_generator_weights(model, store):
    async def synchronous_rl(batch_size):
        dataloader, policy, reward, buffer, trainer = await start(model, store, ReinforceLoss(clip_ratio=0.2), 2)
        version = 0
        while version < 2:
            # Collect full batch
            for _ in range(batch_size):
                await generate_episode(dataloader, policy, reward, buffer)

            # Train on the complete batch
            batch = await buffer.sample.route(version, batch_size)
            await trainer.train_step.route(batch)

            # Update weights in lockstep
            await policy.update_weights.fanout(version + 1)
            version += 1
        completion = await policy.generate.route("abc>")
        assert completion.version == 2
        assert await policy.generate.route("abc>", n=3, temperature=0.0)

    run(synchronous_rl(4))


@pytest.mark.full
def test_documented_async_loop_trains_three_steps(model, store):
    async def main():
        dataloader, policy, reward, buffer, trainer = await start(model, store, SimpleGRPOLoss(beta=0.0))
        losses = []

        async def continuous_rollouts():
            while len(losses) < 3:
                prompt, target = await dataloader.sample.route()
                response = await policy.generate.route(prompt)
                value = await reward.evaluate_response.route(prompt=prompt, response=response.text, target=target)
                await buffer.add.route(Episode(response, value))

        async def continuous_training():
            for version in range(3):
                batch = await buffer.sample.route(version, 4)
                losses.append((await trainer.train_step.route(batch))["train/loss"])
                await policy.update_weights.fanout(version + 1)

        async def async_rl_loop(num_rollout_loops: int):
            # Start concurrent rollout loops
            rollouts = [asyncio.create_task(continuous_rollouts()) for _ in range(num_rollout_loops)]

            # Start continuous training
            training = asyncio.create_task(continuous_training())

            await asyncio.gather(*rollouts, training)

        await async_rl_loop(2)
        assert len(losses) == 3

    run(main())


def test_overview_rollout_and_training_loops_run_together(model, store):
    (code,) = re.findall(r"```text\n(async def rollout.*?)```", OVERVIEW, re.DOTALL)

    async def main():
        dataset, policy, reward, buffer, trainer = await start(model, store, ReinforceLoss())
        names = {"dataset": dataset, "policy": policy, "reward": reward, "buffer": buffer, "trainer": trainer}
        names |= {"Group": Group, "Episode": Episode, "batch_size": 2}
        exec(code, names)
        for version in range(2):
            names["version"] = version
            await asyncio.gather(names["rollout"](), names["rollout"](), names["training"]())
        assert (await policy.generate.route("abc>")).version == 2

    run(main())


@pytest.mark.full
def test_generator_weights_equal_trainer_weights(model, store):
    async def main():
        _, policy, _, _, trainer = await start(model, store, ReinforceLoss())
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

    run(main())
