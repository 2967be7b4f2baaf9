"""Episodes of several turns as a group environment of recipes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from forge.envs.group import GroupEnv, PolicyService
from forge.observability import record_metric
from forge.types import Episode, Sample

from .dialogue import Dialogue
from .environment import Environment
from .rollout import rollout as play_episode


class MultiTurnEnv(GroupEnv):
    """Environments of several turns, one for each episode.

    Args:
        environment: makes an environment.
        dialogue: converts between messages and tokens.
        limits: of `forge_envs.rollout`: max_turns, max_tokens and so on.
    """

    def __init__(self, environment: Callable[[], Environment], dialogue: Dialogue, **limits: Any) -> None:
        super().__init__()
        self.environment, self.dialogue, self.limits = environment, dialogue, limits

    async def play(
        self, policy: PolicyService, sample: Sample, n: int, seed: int, *, evaluation: bool, **sampling: Any
    ) -> list[Episode]:
        """Play n episodes concurrently, each in a separate environment."""
        options = {"dialogue": self.dialogue, "seed": seed, **self.limits, **sampling}
        plays = (play_episode(policy, self.environment(), sample, sample=number, **options) for number in range(n))
        episodes = await asyncio.gather(*plays)
        for episode in episodes:
            outcome = episode.outcome
            episode.info["correct"] = None if outcome is None else outcome >= 1.0
            if not evaluation:
                record_metric("episode/infrastructure", episode.info["stop"] == "infrastructure")
        return episodes
