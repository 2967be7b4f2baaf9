"""The service itself, in the controller: its replicas, and what happens to a call whose replica is lost."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...observability.metrics import Reduce, record_metric
from .cast import Cast
from .errors import CallTimeout, ForgeError, PoisonRequest, ReplicaDied, ServiceStopped
from .handle import Call, Handle
from .load_balancer import LoadBalancer
from .remote_service import pickled
from .replica import Component, Replica
from .request import Request, new_id
from .routers import resolve_router
from .supervisor import Supervisor

# How long a replica that `scale` removes may work on what it has begun.
DRAIN_PATIENCE = 30.0
# Before a request of a lost replica is sent again: replicas that died at the same moment are known by then, and the
# request is not blamed for two deaths that it only saw.
RETRY_DELAY = 0.1


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica as it is now. Latencies are over its last 512 calls, in milliseconds; NaN before the first."""

    name: str
    state: str
    pids: list[int]
    in_flight: int
    served: int
    restarts: int
    latency_p50: float
    latency_p99: float
    error: str


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """A service as it is now; `queued` calls wait for a replica, `quarantined` names those that killed."""

    name: str
    replicas: list[ReplicaStatus]
    queued: int
    restarts: int
    retried: int
    quarantined: list[str]


class Service(Handle):
    """The replicas of one component. Made by `Component.options(...).as_service(...)`.

    Pickled, it becomes a handle with the same verbs: a component may be given other services as arguments.
    """

    def __init__(
        self,
        component: Component,
        endpoints: dict[str, bool],
        launch: Callable[[int, int], Any],
        give_back: Callable[[str, int | None], Coroutine[Any, Any, None]],
        on_dead: Callable[[BaseException], None],
    ) -> None:
        super().__init__(component.name, frozenset(endpoints))
        self._component, self._options = component, component.options
        self._launch, self._give_back, self._on_dead = launch, give_back, on_dead
        self._catch_up = frozenset(name for name, catch_up in endpoints.items() if catch_up)
        self._latest: dict[str, Call] = {}
        self._balancer = LoadBalancer(resolve_router(self._options.router), self._options.max_in_flight)
        self._supervisors: list[Supervisor] = []
        self._scaling = asyncio.Lock()
        self._retried = 0
        self._quarantined: list[str] = []
        self._stopped = False
        # Awaited with the arguments of a fanout before it is sent, by endpoint.
        self.before_fanout: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {}

    def __reduce__(self):
        return pickled(self)

    async def scale(self, num_replicas: int) -> None:
        """Have this many replicas from now on. New ones serve as soon as they are ready; removed ones finish what they
        have begun, within thirty seconds.

        Raises:
            what a new replica's setup raised; the service then keeps the replicas it had.
        """
        if num_replicas < 1:
            raise ValueError(f"{self._name} needs at least one replica, got {num_replicas}: use stop to end it")
        async with self._scaling:
            self._check_runs()
            # Those that were given up make room first, also on their devices.
            await asyncio.gather(*(self._retire(one) for one in self._supervisors if one.state == "failed"))
            living = [one for one in self._supervisors if one.state != "stopped"]
            kept, removed = living[:num_replicas], living[num_replicas:]
            free = (index for index in itertools.count() if all(one.index != index for one in kept))
            added = [self._supervisor(next(free)) for _ in range(num_replicas - len(kept))]
            # A fanout, the watchdog and `stop` must see those that are still starting.
            self._supervisors = sorted(kept + added, key=lambda one: one.index)
            try:
                # Wait for all of them before raising: none may come up after the service went back.
                for error in await asyncio.gather(*(one.start() for one in added), return_exceptions=True):
                    if isinstance(error, BaseException):
                        raise error
            except BaseException:
                self._supervisors = sorted({*self._supervisors, *removed} - {*added}, key=lambda one: one.index)
                await asyncio.shield(asyncio.gather(*(self._retire(one) for one in added)))
                raise
            await asyncio.gather(*(self._retire(one) for one in removed))

    def status(self) -> ServiceStatus:
        """How every replica is, and the queue."""
        rows = []
        for supervisor in self._supervisors:
            replica = supervisor.replica
            times = sorted(replica.latencies) if replica else []
            rows.append(
                ReplicaStatus(
                    supervisor.name,
                    supervisor.state,
                    replica.pids if replica else [],
                    replica.in_flight if replica else 0,
                    replica.served if replica else 0,
                    supervisor.restarts,
                    1e3 * statistics.median(times) if times else float("nan"),
                    1e3 * times[int(0.99 * len(times))] if times else float("nan"),
                    str(supervisor.error or ""),
                )
            )
        restarts = sum(row.restarts for row in rows)
        return ServiceStatus(
            self._name, rows, len(self._balancer.queued), restarts, self._retried, list(self._quarantined)
        )

    async def stop(self) -> None:
        """Stop every replica. Later calls raise ServiceStopped."""
        self._stopped = True
        self._balancer.close(self._was_stopped)
        await asyncio.gather(*(supervisor.stop() for supervisor in self._supervisors))
        await self._give_back(self._name, None)

    shutdown = stop

    def _was_stopped(self) -> ServiceStopped:
        return ServiceStopped(f"{self._name} was stopped")

    def _check_runs(self) -> None:
        if self._stopped:
            raise self._was_stopped()
        self._balancer.check_open()

    async def _dispatch(self, call: Call) -> Any:
        self._check_runs()
        if call.verb == "route":
            return (await self._route(self._request(call)))[0]
        if call.verb == "fanout":
            if call.endpoint in self.before_fanout:
                await self.before_fanout[call.endpoint](*call.args, **call.kwargs)
            return await self._fanout(call)
        if len(self._supervisors) != 1:
            raise ForgeError(
                f"{call.verb} addresses one actor mesh and {self._name} has {len(self._supervisors)} replicas: "
                "use route (one replica) or fanout (all)"
            )
        if call.verb == "call_one" and self._options.procs != 1:
            raise ForgeError(f"call_one needs one process and {self._name} has {self._options.procs}: use call")
        values = await self._route(self._request(call))
        return values[0] if call.verb == "call_one" else values

    def _end_session(self, session: str) -> None:
        self._balancer.end_session(session)

    async def _route(self, request: Request) -> list[Any]:
        async def take() -> Replica:
            try:
                return await self._balancer.acquire(request)
            except TimeoutError:
                states = ", ".join(f"{one.name} {one.state}" for one in self._supervisors)
                raise CallTimeout(
                    f"{request.caller} waited {request.limit:g} s for {self._name}.{request.endpoint} and no replica "
                    f"had room: {states}"
                ) from None

        values = await self._serve(request, take)
        assert values is not None
        return values

    async def _serve(
        self, request: Request, take: Callable[[], Coroutine[Any, Any, Replica | None]], *, catch_up: bool = False
    ) -> list[Any] | None:
        """Have the request served by the replica that `take` enters it at, and if that dies by the next one. None if
        there is none, or it will `catch_up` on the call when it is replaced."""
        while (replica := await take()) is not None:
            try:
                if replica.alive:  # else it died between the choice and this moment
                    return await replica.serve(request)
                request.attempts -= 1
            except ReplicaDied as died:
                if replica.alive:
                    raise  # the endpoint itself raised it, about another service
                if catch_up:
                    return None
                self._lost(request, replica, died)
            finally:
                self._balancer.release(replica, request)
            await asyncio.sleep(RETRY_DELAY)
        return None

    def _lost(self, request: Request, replica: Replica, died: ReplicaDied) -> None:
        """Decide whether a request may be sent again after its replica died; raise if not."""
        if self._stopped:
            raise self._was_stopped()
        request.avoid.add(replica.index)
        if not replica.blameless:
            request.saw_death(replica.died, len(replica.suspects))
            if request.deaths >= self._options.quarantine_after and replica.suspects == {request}:
                what = f"{self._name}.{request.endpoint} (request {request.id}, from {request.caller})"
                self._quarantined.append(what)
                raise PoisonRequest(
                    f"{what} was being served when {request.deaths} replicas died, the last time as the only one under "
                    f"suspicion: it is not tried again. {died}"
                ) from died
        if request.attempts > self._options.retries:
            raise ReplicaDied(f"{request.endpoint} was sent {request.attempts} times, and its replica died: {died}")
        self._retried += 1
        record_metric(f"retries/{self._name}", 1.0, Reduce.SUM)

    async def _fanout(self, call: Call) -> list[Any]:
        catch_up, before = call.endpoint in self._catch_up, self._latest.get(call.endpoint)
        if catch_up:
            # Replicas that are away get it before they serve again, after what was called before it.
            self._latest.pop(call.endpoint, None)
            self._latest[call.endpoint] = call

        async def leg(supervisor: Supervisor, request: Request) -> list[Any] | None:
            async def take() -> Replica | None:
                try:
                    replica = await supervisor.when_up(request.left)
                except TimeoutError:
                    raise CallTimeout(
                        f"{request.caller} waited {request.limit:g} s for {supervisor.name}.{request.endpoint}, "
                        f"which is {supervisor.state}: {supervisor.error}"
                    ) from None
                if replica is not None:
                    replica.enter(request)
                return replica

            return await self._serve(request, take, catch_up=catch_up)

        up = [one for one in self._supervisors if one.state == "up"]
        there = up if catch_up else [one for one in self._supervisors if not (up and one.homeless)]
        cast = Cast() if self._options.per_process > 1 else None
        legs = [leg(one, self._request(call, cast)) for one in there]
        answers = await asyncio.gather(*legs, return_exceptions=True)
        self._check_runs()
        for answer in answers:
            if isinstance(answer, BaseException):
                if catch_up and self._latest[call.endpoint] is call:
                    # A new replica must not start with a call that raised on a living one.
                    self._latest.pop(call.endpoint)
                    if before is not None:
                        self._latest[call.endpoint] = before
                raise answer
        return [answer[0] for answer in answers if isinstance(answer, list)]

    def _request(self, call: Call, cast: Cast | None = None) -> Request:
        limit = self._options.call_timeout if call.timeout is None else call.timeout
        request_id = call.request_id or new_id(self._name)
        return Request(request_id, call.endpoint, call.args, call.kwargs, call.caller, limit, call.session, cast)

    def _supervisor(self, index: int) -> Supervisor:
        async def launch(incarnation: int) -> Replica:
            replica = await self._launch(index, incarnation)
            # Repeat the last call of each catch-up endpoint, until none came meanwhile.
            done: dict[str, Call] = {}
            while missed := [call for call in self._latest.values() if done.get(call.endpoint) is not call]:
                for call in missed:
                    done[call.endpoint] = call
                    request = self._request(call)
                    replica.enter(request)
                    try:
                        await replica.serve(request, self._options.setup_timeout)
                    except BaseException as error:
                        replica.fail(f"it could not catch up on {call.endpoint}: {error}")
                        await asyncio.shield(asyncio.ensure_future(replica.stop()))
                        raise
                    finally:
                        replica.leave(request)
            return replica

        return Supervisor(
            index, f"{self._name}[{index}]", self._options, launch, self._balancer, self._on_supervisor_failed
        )

    @contextmanager
    def waiting_for_a_host(self, index: int) -> Iterator[None]:
        """Fanouts leave out a replica that waits for a host: there may be none for hours."""
        supervisor = next((one for one in self._supervisors if one.index == index), None)
        if supervisor is None:
            yield
            return
        supervisor.homeless = True
        try:
            yield
        finally:
            supervisor.homeless = False

    def is_alone(self, index: int) -> bool:
        """Whether no other replica serves, or the service is only being started."""
        starting = any(one.state == "starting" for one in self._supervisors if one.index == index)
        return starting or not any(one.state == "up" for one in self._supervisors if one.index != index)

    async def _retire(self, supervisor: Supervisor) -> None:
        supervisor.retire()
        if supervisor.replica is not None:
            await self._balancer.drain(supervisor.replica, DRAIN_PATIENCE)
        await supervisor.stop()
        await self._give_back(self._name, supervisor.index)

    def _on_supervisor_failed(self, supervisor: Supervisor) -> None:
        def error() -> ReplicaDied:
            error = ReplicaDied(f"no replica of {self._name} is left. {supervisor.error}")
            error.__cause__ = supervisor.error
            return error

        if all(other.state in ("failed", "stopped") for other in self._supervisors):
            self._balancer.close(error)
            self._on_dead(error())
