"""Environments as a service: episodes stay where they began, and are lost with their replica and nothing else."""

import asyncio
import os

import pytest

from forge.runtime.controller import run
from forge_envs import Action, Environment, Step
from forge_envs.actors import EnvironmentActor, RemoteEnvironment

pytestmark = pytest.mark.processes


class Count(Environment):
    """Counts its steps, and says in which process."""

    async def reset(self, task, *, seed):
        self.count = 0
        return Step(({"role": "user", "content": f"{task} {seed}"},), info={"pid": os.getpid()})

    async def step(self, action):
        self.count += 1
        if action.text == "wrong":
            raise KeyError("no such move")
        return Step(info={"pid": os.getpid(), "count": self.count}, terminated=self.count == 5)


@pytest.mark.full
def test_episodes_keep_to_their_replica_and_do_not_meet():
    async def main():
        service = await EnvironmentActor.options(num_replicas=2).as_service(Count)

        async def play(number):
            env = RemoteEnvironment(service)
            step = await env.reset("task", seed=number)
            assert step.messages[0]["content"] == f"task {number}"
            steps = [await env.step(Action("go")) for _ in range(5)]
            assert {one.info["pid"] for one in steps} == {step.info["pid"]}
            assert [one.info["count"] for one in steps] == [1, 2, 3, 4, 5]
            await env.close()
            await env.close()
            return step.info["pid"]

        assert len({*await asyncio.gather(*map(play, range(16)))}) == 2
        assert await service.count.fanout() == [0, 0]

        env = RemoteEnvironment(service)
        await env.reset("task", seed=0)
        with pytest.raises(KeyError, match="no such move"):
            await env.step(Action("wrong"))
        assert (await env.step(Action("go"))).info["count"] == 2

    run(main())
