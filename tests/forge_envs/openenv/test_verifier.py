"""OpenEnv servers as verifiers of single answers."""

import asyncio
import math
from typing import Any

import pytest

from forge.config import ConfigError, build
from forge.recipes.rl_config import RLConfig
from forge_envs import Action, Environment, Step
from forge_envs.openenv import OpenEnvVerifier, serve


class Closeness(Environment):
    """How near a number is to the answer; words get no reward, and "more" another turn."""

    async def reset(self, task: Any, *, seed: int) -> Step:
        self.question, self.answer = task["question"], float(task["answer"])
        return Step(({"role": "user", "content": self.question},))

    async def step(self, action: Action) -> Step:
        if action.content == "more":
            return Step(({"role": "user", "content": "again"},))
        if not action.content.isdecimal():
            return Step(reward=None, terminated=True)
        return Step(reward=1 / (1 + abs(self.answer - float(action.content))), terminated=True)


def test_openenv_verifier_scores_responses_on_remote_server() -> None:
    async def main() -> Any:
        async with serve(Closeness) as url:
            verifier = OpenEnvVerifier(url, sessions=3)
            scores = await verifier.score("how many?", ["7", "8", "10", "seven", "more", *["6"] * 20], "7")
            await verifier.close()
            return scores

    scores = asyncio.run(main())
    assert scores.values[:3, 0].tolist() == [1.0, 0.5, 0.25]
    assert scores.values[5:, 0].tolist() == [0.5] * 20
    assert all(math.isnan(value) for value in scores.values[3:5, 0])
    assert "did not end the episode after one action" in scores.reasons[4, 0]


def test_reward_config_accepts_openenv_verifier() -> None:
    def settings(url: str) -> dict[str, Any]:
        function = {"use": "forge_envs.openenv:OpenEnvVerifier", "url": url, "name": "tests"}
        return {
            "model": "m",
            "dataset": {"path": "rows.jsonl"},
            "reward": {"functions": [function], "accuracy": "ExactMatch"},
        }

    assert build(RLConfig, settings("http://127.0.0.1:8000")).reward.functions
    with pytest.raises(ConfigError, match="must start with http:// or https://"):
        build(RLConfig, settings("127.0.0.1:8000"))
