"""A policy in environments, as a recipe needs it: groups of episodes to learn from, and success on what is held out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ..controller import Service
from ..envs import Dialogue, Environment, rollout
from ..observability import Reduce, phase, record_metric
from ..types import Episode, Sample

IN_VAIN = 64


class Agent:
    """Plays episodes on the samples of a dataset.

    Args:
        environment: makes an environment; every episode has one of its own.
        dialogue: between the environment's messages and the policy's tokens.
        limits: of `forge.envs.rollout`: max_turns, max_tokens and so on.
    """

    def __init__(self, environment: Callable[[], Environment], dialogue: Dialogue, **limits: Any) -> None:
        self.environment, self.dialogue, self.limits = environment, dialogue, limits
        self._in_vain = 0

    async def group(self, policy: Service, task: Sample, n: int, seed: int) -> list[Episode]:
        """n episodes of the same task, from the same start. One that could not be scored has no reward, and is counted.

        RuntimeError: none could be scored for `IN_VAIN` groups, so that the run would never end.
        """
        plays = (self._play(policy, task, seed=seed, sample=sample) for sample in range(n))
        episodes = await asyncio.gather(*plays)
        for episode in episodes:
            _record(episode)
        scored = any(episode.outcome is not None for episode in episodes)
        self._in_vain = 0 if scored else self._in_vain + 1
        if self._in_vain == IN_VAIN:
            info = {name: value for name, value in episodes[0].info.items() if name != "messages"}
            raise RuntimeError(f"no episode of {IN_VAIN} groups in a row could be scored; of the last one: {info}")
        return episodes

    async def evaluate(self, policy: Service, tasks: Sequence[Sample], **sampling: Any) -> dict[str, float]:
        """`{"eval/accuracy": share}` of the tasks whose greedy episode has a reward of at least 1, and the mean reward
        and turns; empty without tasks. An episode without a reward is left out and counted in `eval/unscored`."""
        if not tasks:
            return {}
        with phase("evaluate"):
            greedy = {"temperature": 0.0, **sampling}
            plays = (self._play(policy, task, seed=number, **greedy) for number, task in enumerate(tasks))
            episodes = await asyncio.gather(*plays)
        rewards = [outcome for episode in episodes if (outcome := episode.outcome) is not None]
        if not rewards:
            raise RuntimeError(f"no episode of the evaluation could be scored: {episodes[0].info}")
        return {
            "eval/accuracy": sum(reward >= 1.0 for reward in rewards) / len(rewards),
            "eval/reward": sum(rewards) / len(rewards),
            "eval/turns": sum(episode.info["turns"] for episode in episodes) / len(episodes),
            "eval/unscored": (len(episodes) - len(rewards)) / len(episodes),
        }

    async def _play(self, policy: Service, task: Sample, **how: Any) -> Episode:
        return await rollout(policy, self.environment(), task, dialogue=self.dialogue, **self.limits, **how)


def _record(episode: Episode) -> None:
    outcome, info = episode.outcome, episode.info
    if outcome is not None:
        record_metric("reward", outcome)
        record_metric("reward", outcome, Reduce.STD)
        record_metric("accuracy", outcome >= 1.0)
    record_metric("episode/turns", info["turns"])
    record_metric("episode/tokens", sum(len(branch.tokens) for branch in (*episode.branches, episode)))
    record_metric("episode/calls", info["calls"])
    record_metric("episode/unread_calls", info["unread_calls"])
    record_metric("episode/unscored", outcome is None)
    for stop in ("terminated", "truncated", "max_turns", "max_tokens", "infrastructure"):
        record_metric(f"episode/{stop}", info["stop"] == stop)
