"""The loop of reinforcement learning, written out: a small model learns to repeat a letter three times, on a CPU."""

import asyncio
from operator import eq

from forge import Episode, Group, VersionStore, run
from forge.actors import DatasetActor, PolicyActor, ReplayBuffer, RewardActor, Trainer
from forge.algorithms import GRPO
from forge.models import build_small_model

STEPS, PROMPTS, SAMPLES = 60, 6, 32
MAX_POLICY_AGE = 0  # rollouts and training take turns; with 1 they overlap
ROWS = [{"question": letter, "answer": letter * 3} for letter in "abcdef"]


def match_characters(prompt, response, target):
    return sum(map(eq, response, target)) / max(len(response), len(target))


async def roll_out(dataset, policy, reward, buffer):
    while True:
        await buffer.admit.route()  # waits while MAX_POLICY_AGE versions ahead of the trainer
        prompt, target = await dataset.sample.route()
        completions = await policy.generate.route(prompt, n=SAMPLES)
        rewards = await reward.evaluate_group.route(prompt, [c.text for c in completions], target)
        await buffer.add.route(Group(list(map(Episode, completions, rewards))))


async def train(policy, buffer, trainer):
    for version in range(STEPS):
        groups = await buffer.sample.route(version, PROMPTS)
        await trainer.train_step.route(groups)
        await policy.update_weights.fanout(version + 1)
        print(f"step {version + 1}: reward {sum(sum(g.rewards) for g in groups) / PROMPTS / SAMPLES:.2f}", flush=True)


async def main():
    model = build_small_model("runs/loop", alphabet="abcdef>", layers=2)
    store = VersionStore.create()  # the weights of each step, in shared memory
    dataset, policy, reward, buffer, trainer = await asyncio.gather(
        DatasetActor.as_local(model, ROWS, prompt_template="{question}>"),
        PolicyActor.options(num_replicas=2).as_service(model, store=store, max_tokens=4),
        RewardActor.as_local([match_characters]),
        ReplayBuffer.as_local(batch_size=PROMPTS, max_policy_age=MAX_POLICY_AGE),
        Trainer.as_actor(model, loss=GRPO(), store=store, optimizer={"learning_rate": 3e-3}),
    )
    async with asyncio.TaskGroup() as tasks:
        rollouts = [tasks.create_task(roll_out(dataset, policy, reward, buffer)) for _ in range(PROMPTS)]
        await train(policy, buffer, trainer)
        for rollout in rollouts:
            rollout.cancel()


run(main())
