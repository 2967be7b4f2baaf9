"""Tasks of a server by split and number, as OpenEnv 0.10 serves them, and environments of the package's clients."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from forge.envs import Action, Environment, Step
from forge_envs.openenv import OpenEnvClient, OpenEnvEnvironment, OpenEnvError, serve

SETS = {"train": [{"number": number} for number in range(5)], "hard": [{"number": 100}]}


class Halve(Environment):
    """Half of a number."""

    async def reset(self, task: Any, *, seed: int) -> Step:
        self.number = task["number"]
        return Step(({"role": "user", "content": f"half of {self.number}?"},))

    async def step(self, action: Action) -> Step:
        return Step(reward=float(action.content == str(self.number / 2)), terminated=True)


async def post(url: str, path: str, **body: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.post(url + path, json=body) as response:
        return response.status, await response.json()


def test_tasks_are_listed_and_played() -> None:
    async def main() -> None:
        async with serve(Halve, tasks=SETS) as url, OpenEnvClient(url) as client:
            [name] = await client.environments()
            assert name == "Halve"
            kinds = {split["name"]: split["type"] for split in await client.splits("halve")}
            assert kinds == {"train": "train", "hard": "validation"}
            assert await client.num_tasks(name, "train") == 5
            assert await client.tasks(name, "train", 3) == [{"number": 3}, {"number": 4}]
            assert await client.tasks(name, "hard") == SETS["hard"]
            env = OpenEnvEnvironment(client)
            rewards = []
            for index in range(5):
                await env.reset({"split": "train", "index": index}, seed=0)
                rewards.append((await env.step(Action(str(index / 2), str(index / 2)))).reward)
            assert rewards == [1.0] * 5
            with pytest.raises(OpenEnvError, match="index must be from 0 to 4, got 5"):
                await env.reset({"split": "train", "index": 5}, seed=0)
            await env.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/Halve/task", {"split": "train", "index": -1}, 400, "index must be from 0 to 4, got -1"),
        ("/Halve/task", {"split": "train", "index": True}, 400, "index must be an integer"),
        ("/Halve/num_tasks", {"split": "tain"}, 400, "unknown split 'tain': there are train, hard"),
        ("/Halve/task_range", {"split": "train", "start": "0"}, 400, "must be integers or null"),
        ("/Chess/num_tasks", {"split": "train"}, 404, "unknown environment 'Chess'"),
    ],
)
def test_what_is_not_there_is_one_line(path: str, body: dict[str, Any], status: int, reason: str) -> None:
    async def main() -> tuple[int, Any]:
        async with serve(Halve, tasks=SETS) as url:
            return await post(url, path, **body)

    answered, content = asyncio.run(main())
    assert answered == status
    assert reason in content["detail"]


def test_an_environment_without_lists_says_so() -> None:
    async def main() -> None:
        async with serve(Halve) as url, OpenEnvClient(url) as client:
            with pytest.raises(OpenEnvError, match=r"HTTP_501.*lists no tasks"):
                await client.splits("Halve")
            # Then these are parameters of the environment, as any others.
            async with client.session() as session:
                await session.reset(number=4)

    asyncio.run(main())


def test_a_client_of_the_package_is_an_environment() -> None:
    core = pytest.importorskip("openenv.core")

    async def main() -> None:
        async with serve(Halve, tasks=SETS) as url:
            theirs = core.GenericEnvClient(base_url=url)
            await theirs.connect()
            env = OpenEnvEnvironment(theirs)
            await env.reset({"split": "hard", "index": 0}, seed=0)
            assert (await env.step(Action("50.0", "50.0"))).reward == 1.0
            await env.close()
            await theirs.close()

    asyncio.run(main())


def test_a_client_that_has_not_started_is_one_line() -> None:
    class Client:
        base_url = None

    with pytest.raises(ValueError, match="Client has no server yet: await its connect"):
        OpenEnvEnvironment(Client())
