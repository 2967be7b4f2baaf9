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


def test_named_actions():
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


def test_numbered_actions_and_a_limit_of_steps():
    steps = played(GymnasiumEnvironment(lake), ["0"] * 7 + ["4", "-1", "one", "0"])
    assert [step.messages[0]["content"] for step in steps[8:11]] == ["error: an action is a number from 0 to 3"] * 3
    assert (steps[-1].terminated, steps[-1].truncated) == (False, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<think>\nsafe\n</think>\n\n2", "1"),
        ("<think>up? 3</think> 1", "4"),
        ("down is 1</think>2", "1"),
        ("[THINK]0[/THINK]1", "4"),
        ("<reasoning>left</reasoning>\n2\n", "1"),
        ("<think>2", "error: an action is a number from 0 to 3"),
    ],
)
def test_thoughts_are_no_part_of_an_action(text, said):
    assert played(GymnasiumEnvironment(lake), [text])[1].messages[0]["content"] == said


def test_a_turn_that_was_cut_is_not_played():
    async def main(env):
        await env.reset(None, seed=0)
        cut = await env.step(Action("2", "2", truncated=True))
        whole = await env.step(Action("2", "2"))
        await env.close()
        return cut, whole

    cut, whole = asyncio.run(main(GymnasiumEnvironment(lake)))
    assert "was cut at its limit" in cut.messages[0]["content"]
    assert (cut.reward, cut.done, whole.messages[0]["content"]) == (0.0, False, "1")
    played_on, whole = asyncio.run(main(GymnasiumEnvironment(lake, play_truncated=True)))
    assert (played_on.messages[0]["content"], whole.messages[0]["content"]) == ("1", "2")


def test_text():
    env = GymnasiumEnvironment(Spelling)
    first, long, last = played(env, ["far too long", "eert"], {"word": "tree"})
    assert first.messages[0]["content"] == "tree"
    assert long.messages[0]["content"].startswith("error: an action is 1 to 8 characters of")
    assert last.reward == 1.0
    assert played(env, [], seed=3) == played(env, [], seed=3)


def test_a_call_that_hangs_is_an_infrastructure_failure():
    env = GymnasiumEnvironment(Spelling, timeout=1.0)
    with pytest.raises(InfrastructureError, match=r"step of a Gymnasium environment took more than 1 s"):
        played(env, ["slow"])
    assert played(env, ["eert"], {"word": "tree"})[-1].reward == 1.0


def test_a_call_that_was_cancelled_keeps_its_environment():
    made = []

    def make():
        made.append(Spelling())
        return made[-1]

    async def main():
        env = GymnasiumEnvironment(make)
        await env.reset(None, seed=0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await env.step(Action("slow", "slow"))
        await env.reset(None, seed=0)

    asyncio.run(main())
    assert len(made) == 2


@pytest.mark.parametrize(
    ("make", "settings", "why"),
    [
        (lambda: gymnasium.make("CartPole-v1"), {}, "need to_text"),
        (lambda: gymnasium.make("Pendulum-v1"), {"to_text": str}, "must be Discrete or Text"),
        (lake, {"actions": ["left", "right"]}, "2 names for the actions of Discrete"),
    ],
)
def test_spaces_that_are_no_text(make, settings, why):
    with pytest.raises(ValueError, match=why):
        played(GymnasiumEnvironment(make, **settings), [])
