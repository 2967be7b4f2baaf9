"""Episodes that agents play: each has a session of the gateway, and becomes what its session recorded."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from forge.envs.environment import InfrastructureError
from forge.envs.group import GroupEnv
from forge.envs.rollout import PolicyService
from forge.observability import Reduce, record_metric
from forge.runtime.controller import ForgeError
from forge.types import Episode, Sample

from .certificate import EXCLUSIONS, Certificate, total
from .record import Auxiliary, SessionRecord
from .settings import Access, SessionSettings

log = logging.getLogger(__name__)
POLICY = "policy"  # the name of the trained model for clients


@dataclass(frozen=True)
class Outcome:
    """How an agent ended.

    reward: None if it could not be scored.
    stop: in a word, such as "exited" or "timeout".
    is_lost: whether something else than the agent failed, so that the episode is to be played again.
    """

    reward: float | None
    stop: str
    is_lost: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


# Plays a task with the access to its session. The scorer is awaited with the last answer, once the agent has ended.
Play = Callable[[Access, Sample], Awaitable[Outcome]]
Score = Callable[[Sample, str, bool], Awaitable[float | None]]


class AgentEnv(GroupEnv):
    """Plays groups of episodes by an agent.

    Args:
        gateway: a service of `forge_agents.actor.GatewayActor`.
        play: runs the agent.
        score: of the agent's last answer; None: `play` scores.
        limits: fields of `SessionSettings`.
        retries: how often an episode that was lost is played again.
        concurrency: episodes at once.
    """

    def __init__(
        self,
        gateway: Any,
        play: Play,
        score: Score | None = None,
        *,
        limits: Mapping[str, Any] | None = None,
        retries: int = 2,
        auxiliary: Auxiliary = "drop",
        concurrency: int = 64,
        resources: Any = None,
    ) -> None:
        super().__init__()
        self.gateway, self.play_agent, self.score = gateway, play, score
        self.limits, self.retries, self.auxiliary = dict(limits or {}), retries, auxiliary
        self.resources = resources  # such as the runner of commands, which lives as long as this
        self._room = asyncio.Semaphore(concurrency)

    async def play(
        self, policy: PolicyService, sample: Sample, n: int, seed: int, *, evaluation: bool, **sampling: Any
    ) -> list[Episode]:
        """Play n episodes of a task, each in a session."""
        plays = (self._episode(sample, seed, number, evaluation, sampling) for number in range(n))
        episodes = await asyncio.gather(*plays)
        for episode in episodes:
            outcome = episode.outcome
            episode.info["correct"] = None if outcome is None else outcome >= 1.0
            if not evaluation:
                _record(episode)
        return episodes

    async def _episode(
        self, sample: Sample, seed: int, number: int, evaluation: bool, sampling: Mapping[str, Any]
    ) -> Episode:
        lost = Certificate()
        outcome = Outcome(None, "infrastructure")
        async with self._room:
            for attempt in range(self.retries + 1):
                name = f"{sample.prompt.index}/{number}/{attempt}"
                settings = SessionSettings(name=name, seed=seed, sampling=dict(sampling), **self.limits)
                try:
                    outcome, record = await self._attempt(settings, sample, evaluation)
                except (InfrastructureError, ForgeError, LookupError) as error:
                    log.warning("episode %s was lost: %s", name, error)
                    outcome = Outcome(None, "infrastructure", True, {"error": str(error)})
                    continue
                if not outcome.is_lost:
                    break
                lost.update(record.unlearned(POLICY, self.auxiliary))
        info = {"stop": outcome.stop, "attempts": attempt + 1, "environment": dict(outcome.info)}
        if outcome.is_lost or outcome.stop == "infrastructure":
            return _unscored(info, lost)
        episode = record.episode(POLICY, outcome.reward, auxiliary=self.auxiliary, info=info)
        if episode is None:
            return _unscored(info, total([record.unlearned(POLICY, self.auxiliary), lost]))
        certificate = Certificate(episode.info["certificate"])
        certificate.update(lost)
        episode.info["certificate"] = dict(certificate)
        return episode

    async def _attempt(
        self, settings: SessionSettings, sample: Sample, evaluation: bool
    ) -> tuple[Outcome, SessionRecord]:
        key = secrets.token_hex(16)
        access = await self.gateway.open.route(settings, key)
        try:
            outcome = await self.play_agent(access, sample)
        finally:
            record: SessionRecord = await self.gateway.close.route(key)
            with suppress(ForgeError):  # its journal is removed with the run's folder
                await self.gateway.forget.route(key)
        # A program that asked for nothing and failed says more of the machine than of the policy.
        if outcome.stop == "crashed" and not record.counts.get("requests"):
            return Outcome(None, "infrastructure", True, outcome.info), record
        if self.score is not None and not outcome.is_lost and record.runs.get(POLICY):
            answer = record.runs[POLICY][-1].added[-1]["content"]
            reward = await self.score(sample, answer, evaluation)
            outcome = Outcome(reward, outcome.stop, info=outcome.info)
        return outcome, record


def _unscored(info: Mapping[str, Any], certificate: Certificate) -> Episode:
    """An episode without a turn, which nothing is learned from."""
    filled = {"turns": 0, "calls": 0, "unread_calls": 0, "messages": [], **info, "certificate": dict(certificate)}
    return Episode.played([0], [False], [0.0], [-1], info=filled)


def _record(episode: Episode) -> None:
    certificate = Certificate(episode.info.get("certificate", {}))
    if episode.outcome is None:
        certificate = certificate.without_training("unscored")
    certificate.check()
    record_metric("episode/infrastructure", episode.info["stop"] == "infrastructure")
    for name in ("sampled", "trained", *EXCLUSIONS):
        record_metric(f"certificate/{name}", certificate[name], Reduce.SUM)
    for reason, count in episode.info.get("roots", {}).items():
        record_metric(f"branches/{reason or 'start'}", count, Reduce.SUM)
