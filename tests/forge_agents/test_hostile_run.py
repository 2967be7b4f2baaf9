"""The hostile client against a whole run whose gateway, generator and trainer are killed at random."""

import asyncio
import itertools
import random
from collections import Counter

import httpx
import pytest

pytest.importorskip("openai")

import forge
from benchmarks import agent_soak
from forge_agents.settings import Access

from .test_hostile_client import HostileClient

pytestmark = [pytest.mark.processes, pytest.mark.full, pytest.mark.usefixtures("fork_server")]

STEPS = 12
EPISODES_BETWEEN_KILLS = 30


class PatientClient(HostileClient):
    """A client that asks again where its connection was lost or the gateway was away, as vendors' clients do."""

    async def send(self, path, body):
        while True:
            try:
                return await super().send(path, body)
            except httpx.TransportError:
                await asyncio.sleep(0.1)
            except AssertionError as error:
                # `HostileClient` accepts nothing but an answer; 503 is the gateway's word for "not now".
                if "503" not in str(error) and "overloaded" not in str(error) and "unavailable" not in str(error):
                    raise
                await asyncio.sleep(0.1)


def test_a_hostile_client_loses_nothing_where_processes_are_killed(tmp_path, caplog):
    numbers = itertools.count(1)
    expected = Counter()
    killed = Counter()

    async def hostile(client, sample):
        number = next(numbers)
        access = Access(str(client.base_url).removesuffix("/").removesuffix("/v1"), client.api_key)
        async with httpx.AsyncClient() as http:
            player = PatientClient(http, access, random.Random(number))
            playing = asyncio.create_task(player.play())
            # By the count of episodes and not by the clock: on a slow machine what was killed must have come back.
            if number % EPISODES_BETWEEN_KILLS == 0:
                await asyncio.sleep(0.1 * player.rng.random())
                victim = agent_soak.VICTIMS[number // EPISODES_BETWEEN_KILLS % len(agent_soak.VICTIMS)]
                killed[victim] += agent_soak.kill(victim)
            await playing
        expected.update(player.expected)
        return agent_soak.LOWEST + player.rng.random()

    settings = agent_soak.settings(tmp_path, STEPS, agents=16)
    settings["from_scratch"] |= {"max_positions": 4096}
    settings["training"] |= {"seq_len": 4096}
    settings["grpo"] |= {"max_tokens": 60}
    settings["episode"] |= {"max_tokens": 3000, "max_turns": 40}
    settings["episode"]["agent"]["function"] = hostile
    settings["checkpoint"]["every"] = 2
    history = forge.train(None, **settings).metrics
    figures = agent_soak.check(tmp_path / "soak")
    assert figures["steps"] == STEPS
    assert min(killed[victim] for victim in agent_soak.VICTIMS) >= 3
    # An agent that gives up before its first answer is the only one without a score, and the log says so.
    assert not figures["dropped"] or "without an answer of the policy" in caplog.text
    branches = Counter()
    for row in history:
        branches.update({name.removeprefix("branches/"): row[name] for name in row if name.startswith("branches/")})
    # Every branch has a reason that the client seeded, and most that it seeded are there: some clients gave up.
    assert branches.keys() <= expected.keys()
    assert all(0.5 * expected[reason] < branches[reason] <= 1.1 * expected[reason] for reason in expected)
