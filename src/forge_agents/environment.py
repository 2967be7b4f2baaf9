"""The environment of the RL recipe whose episodes are played by agents, each in its own session of the gateway."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from forge.envs import GroupEnv, PolicyService
from forge.observability import Reduce, metrics_of, record_metric
from forge.recipes.components import POLICY
from forge.runtime.controller import ForgeError, ServiceStopped
from forge.system.files import escape_controls
from forge.types import NO_TURN, Episode, Sample
from forge_envs.environment import InfrastructureError

from .record import EXCLUSIONS, Auxiliary, Certificate, SessionRecord
from .settings import Access, SessionSettings
from .several import Learner

log = logging.getLogger(f"forge.{__name__}")


ENDS = ("ended", "exited")  # how an agent stops that neither failed nor was ended


@dataclass(frozen=True)
class Outcome:
    """Outcome of an episode of an agent: how it ended, and its rewards.

    reward: a number; where several policies play, one for all of them, or a mapping of their names to rewards. None, or
        a number such as NaN: the agent was not scored here.
    stop: why the agent ended, in one word such as "exited" or "timeout".
    is_lost: whether something other than the agent failed, so that the episode is played again.
    info: for the record of the episode: under "error" and "reason" why it failed, under "stdout", "stderr" and "test"
        the end of what its programs printed.
    """

    reward: float | Mapping[str, float] | None
    stop: str
    is_lost: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)

    def reward_of(self, seat: str) -> float | None:
        """Return the reward of the policy that played under a name; None if it was not scored."""
        reward = self.reward.get(seat) if isinstance(self.reward, Mapping) else self.reward
        return reward if reward is not None and math.isfinite(reward) else None

    @property
    def output(self) -> str:
        """Return why the agent failed and the end of what it printed, each with its name; "" if nothing is known."""
        names = ("reason", "error", "stdout", "stderr", "test")
        return "\n".join(f"[{name}] {text.strip()}" for name in names if (text := str(self.info.get(name, ""))))


# Runs an agent until it has ended. Arguments: access to its session, the task, whether this is an evaluation.
Play = Callable[[Access, Sample, bool], Awaitable[Outcome]]
# Returns the reward after that. Arguments: the task, the agent's last answer, whether this is an evaluation.
Score = Callable[[Sample, str, bool], Awaitable[float | None]]


class AgentEnv(GroupEnv):
    """Environment in which an agent plays groups of episodes.

    Args:
        gateway: a service of `forge_agents.gateway.GatewayActor`.
        play: runs the agent for one episode.
        score: returns the reward for the agent's last answer; None: `play` returns it.
        limits: fields of `SessionSettings` for each episode.
        retries: how often a lost episode is played again.
        auxiliary: whether calls outside the task, such as for a title, are trained ("train") or not ("drop").
        concurrency: the number of episodes that are played at once.
        resources: an object that must live as long as this environment.
        seats: for each name under which a policy plays, and whose turns become an episode, the trained policy.
        learners: the additional policies that train, by name.
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
        seats: Mapping[str, str] | None = None,
        learners: Mapping[str, Learner] | None = None,
    ) -> None:
        super().__init__()
        self.gateway, self.play_agent, self.score = gateway, play, score
        self.limits, self.retries, self.auxiliary = dict(limits or {}), retries, auxiliary
        self.resources = resources
        self.seats = dict(seats or {POLICY: POLICY})
        self.learners = dict(learners or {})
        # By checkpoint folder: `forge.recipes.components.start_rl` saves and loads them.
        self.trainers = {
            folder: trainer for learner in self.learners.values() for folder, trainer in learner.trainers().items()
        }
        self._slots = asyncio.Semaphore(concurrency)
        self._reported: set[str] = set()

    async def play(
        self, policy: PolicyService, sample: Sample, n: int, seed: int, *, evaluation: bool, **sampling: Any
    ) -> list[Episode]:
        """Play n sessions of a task, and return n episodes for each seat (trained role), in the order of seats.

        An evaluation returns the first seat's episodes only, and records no metrics.
        """
        task = sample._replace(prompt=sample.prompt.task)
        plays = (self._play_session(task, seed, index, evaluation, sampling) for index in range(n))
        by_session = await asyncio.gather(*plays)

        episodes = [session[seat] for seat in range(len(self.seats)) for session in by_session]
        for index, episode in enumerate(episodes):
            outcome = episode.outcome
            episode.info["correct"] = None if outcome is None else outcome >= 1.0
            episode.info["sample"] = index
            if not evaluation:
                learner = self.seats[episode.policy] if episode.policy else POLICY
                with nullcontext() if learner == POLICY else metrics_of(learner):
                    _record_episode(episode)
        return episodes[:n] if evaluation else episodes

    async def _play_session(
        self, sample: Sample, seed: int, index: int, evaluation: bool, sampling: Mapping[str, Any]
    ) -> list[Episode]:
        """Play one session, with up to `retries` repetitions if it is lost, and return an episode for each seat
        (trained role).

        An episode without a turn to train is returned without a reward.
        """
        certificates = {seat: Certificate() for seat in self.seats}  # they include lost attempts
        outcome = Outcome(None, "infrastructure")
        async with self._slots:
            for attempt in range(self.retries + 1):
                name = f"{sample.prompt.index}/{index}/{attempt}"
                settings = SessionSettings(name=name, seed=seed, sampling=dict(sampling), **self.limits)
                record = SessionRecord({}, frozenset())  # of an attempt without one
                try:
                    outcome, record = await self._play_once(settings, sample, evaluation)
                except ServiceStopped:  # the run is ending
                    raise
                except (InfrastructureError, ForgeError) as error:
                    outcome = Outcome(None, "infrastructure", True, {"error": str(error)})
                if outcome.stop not in ENDS or "error" in outcome.info:
                    self._report_failure(name, outcome)
                if not outcome.is_lost:
                    break
                for seat, certificate in certificates.items():
                    certificate.update(record.unlearned(seat, self.auxiliary))

        limits = [name for name in ("max_turns", "max_tokens") if record.counts.get(name)]
        stop = limits[0] if limits and outcome.stop in ENDS else outcome.stop
        info = {"stop": stop, "limits": limits, "attempts": attempt + 1, "environment": dict(outcome.info)}
        is_lost = outcome.is_lost or outcome.stop == "infrastructure"
        episodes = []

        has_several_seats = len(self.seats) > 1
        for seat, certificate in certificates.items():
            episode = None
            seat_info = dict(info)
            if not is_lost:
                episode = record.episode(seat, outcome.reward_of(seat), auxiliary=self.auxiliary, info=seat_info)

            if episode is not None:
                certificate.update(episode.info["certificate"])
                episode.info["certificate"] = dict(certificate)
            else:
                if not is_lost:
                    certificate.update(record.unlearned(seat, self.auxiliary))
                    if has_several_seats and not record.runs.get(seat):
                        seat_info["stop"] = NO_TURN
                # One token that is not trained stands for a session without a turn to train.
                fields = {"turns": 0, "calls": 0, "unread_calls": 0, "messages": [], **seat_info}
                episode = Episode.played([0], [False], [0.0], [-1], info={**fields, "certificate": dict(certificate)})
            episode.text = "\n".join(filter(None, (episode.text, outcome.output)))

            # "" stands for the run's own policy where no other one plays.
            episode.policy = seat if has_several_seats else ""
            episodes.append(episode)

        return episodes

    async def _play_once(
        self, settings: SessionSettings, sample: Sample, evaluation: bool
    ) -> tuple[Outcome, SessionRecord]:
        # Open a session, run the agent and score it; return how it ended, and what the closed session recorded.
        access = await self.gateway.open.route(settings)
        try:
            outcome = await self.play_agent(access, sample, evaluation)
            if isinstance(outcome.reward, Mapping) and outcome.reward.keys() != self.seats.keys():
                seats, rewarded = (", ".join(sorted(names)) for names in (self.seats, outcome.reward))
                raise ValueError(
                    f"the agent must return a reward for each trained model ({seats}), got rewards for "
                    f"{rewarded or 'none of the models'}"
                )
        finally:
            try:
                record: SessionRecord = await self.gateway.close.route(access.key)
            except LookupError as error:
                raise InfrastructureError(
                    f"the agent's session was lost, because the gateway was restarted ({error})"
                ) from None

        rewards = outcome.reward.values() if isinstance(outcome.reward, Mapping) else [outcome.reward]
        wrong = [reward for reward in rewards if reward is not None and not math.isfinite(reward)]
        if wrong:
            outcome = replace(outcome, info={**outcome.info, "error": f"its reward is {wrong[0]}, not a finite number"})

        # A program that failed before its first request did so whatever the policy says: the machine is at fault.
        if outcome.stop == "crashed" and not record.counts.get("requests"):
            return Outcome(None, "infrastructure", True, outcome.info), record
        if self.score is not None and not outcome.is_lost and "error" not in outcome.info and record.runs.get(POLICY):
            answer = record.runs[POLICY][-1].added[-1]["content"]
            outcome = Outcome(await self.score(sample, answer, evaluation), outcome.stop, info=outcome.info)

        return outcome, record

    def _report_failure(self, name: str, outcome: Outcome) -> None:
        """Log how the agent of an episode failed, once for each distinct last line of its output."""
        reason = ": ".join([outcome.stop, *outcome.output.splitlines()[-1:]])
        kind = "".join(letter for letter in reason if not letter.isdigit())  # numbers, as of a process, are no reason
        if kind not in self._reported and len(self._reported) < 100:
            self._reported.add(kind)
            log.warning(
                "the agent of episode %s failed: %s (logged once for each reason)", name, escape_controls(reason)
            )


def _record_episode(episode: Episode) -> None:
    # Record the metrics of an episode: whether it was lost, its token counts, and why its branches started.
    certificate = Certificate(episode.info.get("certificate", {}))
    if episode.outcome is None:
        certificate = certificate.without_training("unscored")
    certificate.check()
    stop = episode.info["stop"]
    record_metric("episode/infrastructure", stop == "infrastructure")
    record_metric("episode/crashed", stop in ("crashed", "killed", "memory"))
    record_metric("episode/timeout", stop == "timeout")
    for name in ("sampled", "trained", *EXCLUSIONS):
        record_metric(f"certificate/{name}", certificate[name], Reduce.SUM)
    for reason, count in episode.info.get("roots", {}).items():
        record_metric(f"branches/{reason or 'start'}", count, Reduce.SUM)
