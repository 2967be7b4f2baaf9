"""Simulated services: the controller's own balancer and router before engines and reward servers that may fail."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, cast

from ...runtime.controller.balance import LoadBalancer
from ...runtime.controller.options import Options
from ...runtime.controller.routers import resolve_router
from ...runtime.controller.service import RETRY_DELAY
from ...runtime.controller.types import Request
from .engine import EngineLost, SimulatedEngine
from .settings import Faults, Generators

if TYPE_CHECKING:
    from ...runtime.controller.replica import Replica

HOUR = 3600.0
FOREVER = 1e15  # seconds: a request's time limit is of real time, which a simulation does not have
_requests = itertools.count()


class RunEnded(RuntimeError):
    """A failure that the run does not survive."""


class Failures:
    """Draws when hardware fails, and counts failures."""

    def __init__(self, settings: Faults, random: Random) -> None:
        self.settings = settings
        self.random = random
        self.count = 0

    def next(self, gpus: int) -> float:
        """Seconds until one of so many GPUs fails."""
        if self.settings.gpu_hours is None or not gpus:
            return float("inf")
        return self.random.expovariate(gpus / (self.settings.gpu_hours * HOUR))

    def happen(self, name: str) -> None:
        """Count a failure.

        Raises:
            RunEnded: it is one of those that end the run.
        """
        self.count += 1
        if self.random.random() < self.settings.ending:
            raise RunEnded(f"a failure of {name} ended the run")


class SimulatedReplica:
    """What the balancer needs of a replica."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.served = 0
        self.in_flight = 0
        self.alive = True

    def enter(self, request: Request) -> None:
        """Count a request as sent to it."""
        request.attempts += 1
        self.in_flight += 1

    def leave(self, request: Request) -> None:
        """Remove a request."""
        self.in_flight -= 1

    @property
    def requests(self) -> int:
        """Whether it has any, to the balancer."""
        return self.in_flight

    def isolated_requests(self, now: float, isolation: float, patience: float) -> int:
        """None: hardware fails by itself, no request is suspected of it."""
        return 0

    def has_line_for(self, request: Request) -> bool:
        """Never: it serves all at once."""
        return False


def new_request(endpoint: str) -> Request:
    """A request without a time limit."""
    return Request(f"{endpoint}-{next(_requests)}", endpoint, (), {}, "simulation", FOREVER)


class EngineReplica(SimulatedReplica):
    """A replica of the generators."""

    def __init__(self, index: int, engine: SimulatedEngine) -> None:
        super().__init__(index)
        self.engine = engine


class GeneratorService:
    """The generators of a run."""

    def __init__(self, settings: Generators, router: str, failures: Failures) -> None:
        self.settings = settings
        self.options = Options()
        self.balancer = LoadBalancer(resolve_router(router), self.options.max_in_flight)
        self.failures = failures
        self.version = 0
        self.retired: list[SimulatedEngine] = []
        self.replicas = [EngineReplica(index, SimulatedEngine(settings, 0)) for index in range(settings.replicas)]
        for replica in self.replicas:
            self.balancer.join(cast("Replica", replica))

    @property
    def engines(self) -> list[SimulatedEngine]:
        """All engines that ever were."""
        return [*self.retired, *(replica.engine for replica in self.replicas)]

    async def generate(self, lengths: Sequence[int], prompt: int) -> list[int]:
        """Generate a group at one of the replicas, at another if that is lost; the version that began each sample.

        Raises:
            RunEnded: it was lost more often than calls are sent again.
        """
        # As a real service: a call whose replica is lost goes to another, and the lost one is avoided.
        request = new_request("generate")
        while True:
            replica = cast(EngineReplica, await self.balancer.acquire(request))
            try:
                versions = await replica.engine.generate(lengths, prompt)
                replica.served += 1
                return versions
            except EngineLost:
                request.avoid.add(replica.index)
            finally:
                self.balancer.release(cast("Replica", replica), request)
            if request.attempts > self.options.retries:
                raise RunEnded(f"a request was lost with {request.attempts} generators")
            await asyncio.sleep(RETRY_DELAY)

    async def update_weights(self, version: int) -> None:
        """Send new weights to all that serve; the others begin with them."""
        # A replica that is being replaced takes the newest weights when it joins.
        self.version = version
        engines = [replica.engine for replica in self.replicas if replica.alive]
        await asyncio.gather(*(engine.update_weights(version) for engine in engines), return_exceptions=True)

    async def fail_at_times(self, index: int) -> None:
        """Fail one replica and replace it, again and again.

        Raises:
            RunEnded: a failure that ends the run.
        """
        while (seconds := self.failures.next(self.settings.gpus)) < FOREVER:
            await asyncio.sleep(seconds)
            replica = self.replicas[index]
            replica.alive = False
            self.balancer.leave(cast("Replica", replica))
            replica.engine.fail()
            self.failures.happen(f"generator {index}")
            await asyncio.sleep(self.failures.settings.generator_seconds + self.settings.load_seconds)
            # As the supervisor does: another process in the same place, with the newest weights.
            self.retired.append(replica.engine)
            self.replicas[index] = EngineReplica(index, SimulatedEngine(self.settings, self.version))
            self.balancer.join(cast("Replica", self.replicas[index]))


class RewardServers:
    """Servers that score one group after the other."""

    def __init__(self, servers: int) -> None:
        self.balancer = LoadBalancer(resolve_router("least_loaded"), 1)
        self.busy = 0.0
        for index in range(servers):
            self.balancer.join(cast("Replica", SimulatedReplica(index)))

    async def score(self, seconds: float) -> None:
        """Score a group, which takes a server so many seconds."""
        # A server scores one group at a time; the others wait in the balancer's queue.
        request = new_request("score")
        replica = await self.balancer.acquire(request)
        try:
            await asyncio.sleep(seconds)
            self.busy += seconds
            replica.served += 1
        finally:
            self.balancer.release(replica, request)
