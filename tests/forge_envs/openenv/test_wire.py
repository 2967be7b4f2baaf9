"""Steps and actions as JSON: truth values, and numbers of NumPy."""

import asyncio
import json

import numpy as np
import pytest

from forge_envs import Action, Environment, InfrastructureError, Step
from forge_envs.openenv import OpenEnvClient, OpenEnvEnvironment, Reply, serve
from forge_envs.openenv.wire import action_from_json, reply_to_json, step_from_reply

NO_TRUTH = ["false", "true", "", [], [False], {}, 2, -1, 0.5]


@pytest.mark.parametrize(("value", "truth"), [(True, True), (1, True), (False, False), (0, False), (None, False)])
def test_openenv_done_and_truncated_accept_boolean_like_values(value, truth):
    assert Reply.read({"observation": {}, "done": value}).done is truth
    step = step_from_reply(Reply.read({"observation": {}, "done": True, "metadata": {"truncated": value}}))
    assert (step.truncated, step.terminated) == (truth, not truth)


@pytest.mark.parametrize("value", NO_TRUTH)
def test_openenv_done_flags_that_are_not_boolean_like_raise(value):
    with pytest.raises(InfrastructureError, match=r"reply\.done: .* is not one of"):
        Reply.read({"observation": {}, "done": value})
    with pytest.raises(InfrastructureError, match=r"reply\.metadata\.truncated: .* is not one of"):
        Reply.read({"observation": {}, "done": True, "metadata": {"truncated": value}})
    with pytest.raises(InfrastructureError, match=r"observation\.rewritten: .* is not of type"):
        step_from_reply(Reply({"rewritten": value}, None, False, {}))
    with pytest.raises(ValueError, match=r"action\.truncated: .* is not of type"):
        action_from_json({"text": "x", "truncated": value})


class Numbers(Environment):
    """All of its values are NumPy's."""

    async def reset(self, task, *, seed):
        return Step(({"role": "user", "content": "q", "level": np.int64(3)},))

    async def step(self, action):
        info = {"score": np.float32(0.5), "solved": np.bool_(True), "board": np.zeros(2), "day": np.datetime64("2020")}
        return Step(reward=np.float32(1.0), terminated=np.bool_(True), truncated=np.bool_(False), info=info)


def test_openenv_numpy_values_arrive_as_plain_numbers():
    async def main():
        async with serve(Numbers) as url, OpenEnvClient(url) as client:
            env = OpenEnvEnvironment(client)
            first = await env.reset({"level": np.int64(3)}, seed=np.int64(0))
            return first, await env.step(Action("x", "x"))

    first, last = asyncio.run(main())
    assert first.messages[0]["level"] == 3
    assert (last.reward, last.terminated, last.truncated) == (1.0, True, False)
    assert last.info == {"score": 0.5, "solved": True, "board": "[0. 0.]", "day": "2020-01-01"}
    assert json.loads(json.dumps(reply_to_json(Step(truncated=np.bool_(True)))))["metadata"] == {"truncated": True}
