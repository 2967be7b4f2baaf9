"""Environments as a service of replicas: each holds the episodes of many callers, in separate processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

from forge.runtime.controller import CallTimeout, ForgeActor, PoisonRequest, ReplicaDied, Service, endpoint

from .environment import Action, Environment, InfrastructureError, Step


class EnvironmentActor(ForgeActor):
    """Hosts environments of one kind, one for each episode in progress.

    Args:
        make: makes one; called here, for each new episode.
    """

    def __init__(self, make: Callable[[], Environment]) -> None:
        self.make = make
        self.playing: dict[str, Environment] = {}

    @endpoint
    async def reset(self, episode: str, task: Any, seed: int) -> Step:
        """Begin an episode under this name, which no other has."""
        await self.close(episode)
        env = self.playing[episode] = self.make()
        return await env.reset(task, seed=seed)

    @endpoint
    async def step(self, episode: str, action: Action) -> Step:
        """Apply an action to an episode. InfrastructureError: it was lost with another replica."""
        if episode not in self.playing:
            raise InfrastructureError(f"{self.context} does not hold episode {episode}: it was lost with its replica")
        return await self.playing[episode].step(action)

    @endpoint
    async def close(self, episode: str) -> None:
        """Close an episode, if this replica holds it."""
        if (env := self.playing.pop(episode, None)) is not None:
            await env.close()

    @endpoint
    async def count(self) -> int:
        """The number of episodes in progress."""
        return len(self.playing)

    async def teardown(self) -> None:
        """Close the environments of all episodes."""
        for episode in list(self.playing):
            await self.close(episode)


class RemoteEnvironment(Environment):
    """An environment that lives in a service of `EnvironmentActor`: its episodes stay with the replica they began on.
    One that is lost with its replica is an `InfrastructureError`."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.episode = ""

    async def reset(self, task: Any, *, seed: int) -> Step:
        """Begin an episode on one replica; an earlier episode is closed."""
        await self.close()
        self.episode = uuid4().hex
        return await self._ask(self.episode, "reset", task, seed)

    async def step(self, action: Action) -> Step:
        """Apply an action. InfrastructureError: the episode's replica was lost."""
        return await self._ask(self.episode, "step", action)

    async def close(self) -> None:
        """Free the episode's environment on its replica."""
        if self.episode:
            episode = self.episode
            self.episode = ""
            await self._ask(episode, "close")

    async def _ask(self, episode: str, endpoint: str, *args: Any) -> Any:
        try:
            async with self.service.session(episode):
                return await getattr(self.service, endpoint).route(episode, *args)
        except (ReplicaDied, CallTimeout, PoisonRequest) as error:
            raise InfrastructureError(f"the environment was lost: {error}") from error
