"""Questions of reasoning-gym, and scorers that can be fooled."""

import asyncio

import pytest

from forge_envs import Action

pytest.importorskip("reasoning_gym")
from forge_envs.reasoning_gym import UNRELIABLE, ReasoningGymEnvironment


def answered(env, answer=None, task=None, seed=0):
    """The question, and what an answer to it, or the right one, is worth."""

    async def main():
        asked = await env.reset(task, seed=seed)
        said = asked.info["entry"]["answer"] if answer is None else answer
        return asked.messages[0]["content"], await env.step(Action(said, said))

    return asyncio.run(main())


def test_reasoning_gym_asks_and_scores_questions():
    env = ReasoningGymEnvironment("gcd", size=50)
    assert len(env) == 50
    question, step = answered(env, task=3)
    assert "Greatest Common Divisor" in question
    assert (step.reward, step.terminated) == (1.0, True)
    assert (answered(env, "0", task=3)[1].reward, answered(env, seed=53)[0]) == (0.0, question)


def test_reasoning_gym_uses_custom_prompt_and_answer_reader():
    env = ReasoningGymEnvironment(
        "spell_backward",
        prompt=lambda entry: entry["metadata"]["word"],
        answer=lambda text: text.rpartition("answer: ")[2],
        max_word_len=5,
    )
    word, step = answered(env, task=0)
    assert step.reward == 1.0
    assert answered(env, f"answer: {word[::-1]}", task=0)[1].reward == 1.0


@pytest.mark.parametrize("family", [*UNRELIABLE, "basic_arithmetic"])
def test_unreliable_reasoning_gym_families_need_allow_wrong(family):
    with pytest.raises(ValueError, match=f"{family} is off: .*allow_wrong=True"):
        ReasoningGymEnvironment(family)
    ReasoningGymEnvironment(family, allow_wrong=True)


def test_unknown_reasoning_gym_task_raises():
    with pytest.raises(ValueError, match="has no family 'gdc'"):
        ReasoningGymEnvironment("gdc")
    with pytest.raises(ValueError, match="gcd: "):
        ReasoningGymEnvironment("gcd", max_numbers=-1)
