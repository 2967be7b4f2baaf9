"""Gymnasium environments with text and with numbered actions."""

import asyncio
import time

import pytest

from forge_envs import Action, InfrastructureError

pytest.importorskip("gymnasium")
import gymnasium

from forge_envs.gymnasium import GymnasiumEnvironment

LAKE = ["left", "down", "right", "up"]


class Spelling(gymnasium.Env):
    """Say the word backwards."""

    observation_space = action_space = gymnasium.spaces.Text(8, min_length=1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = (options or {}).get("word") or ["tree", "house", "lake"][self.np_random.integers(3)]
        return self.word, {}

    def step(self, action):
        if action == "slow":
            time.sleep(1.5)
        return "said", float(action == self.word[::-1]), True, False, {"word": self.word}


def lake():
    return gymnasium.make("FrozenLake-v1", is_slippery=False, max_episode_steps=8)


def played(env, texts, task=None, seed=0):
    async def main():
        steps = [await env.reset(task, seed=seed), *[await env.step(Action(text, text)) for text in texts]]
        await env.close()
        return steps

    return asyncio.run(main())


def test_gymnasium_named_actions_are_played_and_typos_rejected():
    env = GymnasiumEnvironment(lake, actions=LAKE, prompt="Reach 15.")
    steps = played(env, ["down", "jump", "Down", "right", "right", "down", "right"])
    assert [step.messages[0]["content"] for step in steps] == [
        "Reach 15.\n0",
        "4",
        "error: an action is one of left, down, right, up",
        *["8", "9", "10", "14", "15"],
    ]
    assert [step.reward for step in steps] == [0.0] * 7 + [1.0]
    assert steps[-1].terminated


def test_hung_gymnasium_step_raises_infrastructure_error():
    env = GymnasiumEnvironment(Spelling, timeout=1.0)
    with pytest.raises(InfrastructureError, match=r"step of a Gymnasium environment took more than 1 s"):
        played(env, ["slow"])
    assert played(env, ["eert"], {"word": "tree"})[-1].reward == 1.0
