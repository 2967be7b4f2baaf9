"""Services: send calls to the replicas of a component, and send them again if a replica is lost."""

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...observability.metrics import Reduce, on_the_clock, record_metric
from .balance import LoadBalancer
from .errors import CallTimeout, ForgeError, PoisonRequest, ReplicaDied, ServiceStopped
from .handle import Handle
from .remote_service import RemoteService, relay_for
from .replica import Component, Replica
from .routers import resolve_router
from .supervisor import Supervisor
from .types import Call, Pending, RankValues, ReplicaStatus, Request, ServiceStatus, Value, new_id

# Seconds in which a replica that `scale` removes may finish its calls.
DRAIN_PATIENCE = 30.0
# Seconds before a request of a lost replica is sent again. By then it is known which other replicas died at the same
# moment: otherwise the request could be sent to one of them, and be blamed for both deaths.
RETRY_DELAY = 0.1
RATE_WINDOW = 60.0  # seconds that a replica's rate of answers is taken over


class Service(Handle):
    """The replicas of one component. Created by `Component.options(...).as_service(...)`.

    Pickled, it becomes a handle with the same verbs (RemoteService): a component may get services as arguments.

    Args:
        endpoints: the names of the endpoints, each with whether replicas catch up on it.
        launch: starts the replica of an index and an incarnation, and returns it once it is set up.
        release: frees hosts and devices of a service's replica by name and index; an index of None stands for all.
        on_dead: called with the error when no replica is left.
    """

    def __init__(
        self,
        component: Component,
        endpoints: dict[str, bool],
        launch: Callable[[int, int], Pending[Replica]],
        release: Callable[[str, int | None], Pending[None]],
        on_dead: Callable[[BaseException], None],
    ) -> None:
        super().__init__(component.name, frozenset(endpoints))
        self._component = component
        self._options = component.options
        self._launch, self._release, self._on_dead = launch, release, on_dead

        self._catch_up = frozenset(name for name, catch_up in endpoints.items() if catch_up)
        self._latest: dict[str, Call] = {}  # the last fanout of each catch-up endpoint

        self._balancer = LoadBalancer(resolve_router(self._options.router), self._options.max_in_flight)
        self._supervisors: list[Supervisor] = []
        self._scaling = asyncio.Lock()
        self._retried = 0
        self._quarantined: list[str] = []
        self._stopped = False

        # By endpoint: a function that is awaited with a fanout's arguments before the fanout is sent.
        self.before_fanout: dict[str, Callable[..., Pending[None]]] = {}

    def __reduce__(self):
        return RemoteService, (self._name, self._endpoints, self._options.call_timeout, relay_for(self._name))

    async def scale(self, num_replicas: int) -> None:
        """Change the number of replicas.

        New replicas serve as soon as they are ready. Removed ones have 30 seconds to finish the calls in flight.

        Raises:
            ValueError: `num_replicas` is below 1.
            Exception: what a new replica's setup raised; the service then keeps the replicas that it had.
        """
        if num_replicas < 1:
            raise ValueError(f"{self._name} needs at least one replica, got {num_replicas}: use stop to end it")

        async with self._scaling:
            self._balancer.check_open()

            # Failed replicas are removed first, which frees their devices for new ones.
            failed = [supervisor for supervisor in self._supervisors if supervisor.state == "failed"]
            await asyncio.gather(*map(self._retire_supervisor, failed))
            living = [supervisor for supervisor in self._supervisors if supervisor.state != "stopped"]
            remaining = living[:num_replicas]
            removed = living[num_replicas:]

            # New replicas get the lowest free indices.
            used_indices = {supervisor.index for supervisor in remaining}
            free_indices = (index for index in itertools.count() if index not in used_indices)
            added = [self._make_supervisor(next(free_indices)) for _ in range(num_replicas - len(remaining))]

            # Listed before they are up: a fanout, the watchdog and `stop` must see replicas that are starting.
            self._supervisors = sorted(remaining + added, key=lambda supervisor: supervisor.index)
            try:
                # All starts must have ended before an error is raised and the new replicas are removed again.
                starts = [supervisor.start() for supervisor in added]
                for error in await asyncio.gather(*starts, return_exceptions=True):
                    if isinstance(error, BaseException):
                        raise error
            except BaseException:
                # Back to the replicas from before.
                earlier = {*self._supervisors, *removed} - {*added}
                self._supervisors = sorted(earlier, key=lambda supervisor: supervisor.index)
                await asyncio.shield(asyncio.gather(*map(self._retire_supervisor, added)))
                raise

            await asyncio.gather(*map(self._retire_supervisor, removed))

    def status(self) -> ServiceStatus:
        """Return the state of every replica, and the length of the queue."""
        rows = []
        for supervisor in self._supervisors:
            replica = supervisor.replica
            answers = list(replica.answers) if replica else []  # (time, latency), times of a monotonic clock
            latencies = sorted(latency for _, latency in answers) or [float("nan")]
            now = time.monotonic()
            recent_count = sum(max(0.0, now - answered_at) <= RATE_WINDOW for answered_at, _ in answers)

            rows.append(
                ReplicaStatus(
                    name=supervisor.name,
                    state=supervisor.state,
                    pids=replica.pids if replica else [],
                    in_flight=replica.in_flight if replica else 0,
                    served=replica.served if replica else 0,
                    errors=replica.errors if replica else 0,
                    rate=recent_count / RATE_WINDOW,
                    sessions=sum(assigned is replica for assigned in self._balancer.sessions.values()),
                    restarts=supervisor.restarts,
                    latency_mean=1e3 * statistics.fmean(latencies),
                    latency_p50=1e3 * statistics.median(latencies),
                    latency_p99=1e3 * latencies[int(0.99 * len(latencies))],
                    error=str(supervisor.error or ""),
                )
            )

        restarts = sum(row.restarts for row in rows)
        return ServiceStatus(
            self._name, rows, len(self._balancer.queued), restarts, self._retried, list(self._quarantined)
        )

    async def stop(self) -> None:
        """Stop every replica. Later calls raise ServiceStopped."""
        self._stopped = True
        self._balancer.close(lambda: ServiceStopped(f"{self._name} was stopped"))
        await asyncio.gather(*(supervisor.stop() for supervisor in self._supervisors))
        await self._release(self._name, None)

    shutdown = stop

    async def _dispatch(self, call: Call) -> Value:
        # Send a call to one replica, or by `fanout` to all, and return what its verb promises.
        if call.verb == "fanout":
            return await self._fan_out(call)
        if call.verb != "route" and len(self._supervisors) != 1:
            raise ForgeError(
                f"{call.verb} needs a service with one replica, but {self._name} has {len(self._supervisors)} "
                "replicas: use route (one replica) or fanout (all)"
            )
        if call.verb == "call_one" and self._options.procs != 1:
            raise ForgeError(
                f"call_one needs a component of one process, but {self._name} has procs = {self._options.procs}: use "
                "call"
            )

        request = self._make_request(call)
        with on_the_clock(f"{self._name}.{call.endpoint}"):
            values = await self._serve_request(request, self._balancer.acquire)
        return RankValues(values) if call.verb == "call" else values[0]  # type: ignore[arg-type, index]

    def _end_session(self, session: str) -> None:
        self._balancer.end_session(session)

    async def _serve_request(
        self, request: Request, acquire: Callable[[Request], Pending[Replica | None]], *, catch_up: bool = False
    ) -> list[Value] | None:
        """Serve a request on the replica that `acquire` returns, and on the next one if that dies; return all values.

        Returns None if `acquire` does, or if the replica dies during a call that its replacement catches up on.
        """
        while True:
            try:
                replica = await acquire(request)
            except TimeoutError:
                states = ", ".join(f"{supervisor.name} {supervisor.state}" for supervisor in self._supervisors)
                raise CallTimeout(
                    f"{request.caller} waited {request.limit:g} s for {self._name}.{request.endpoint}, but no replica "
                    f"had capacity: {states}"
                ) from None

            if replica is None:
                return None
            try:
                if replica.alive:
                    return await replica.serve(request)
                request.attempts -= 1  # it died before the request was sent: that is not an attempt
            except ReplicaDied as died:
                if replica.alive:
                    raise  # the endpoint itself raised it, about a service that it called
                if catch_up:
                    return None
                self._handle_loss(request, replica, died)
            finally:
                self._balancer.release(replica, request)

            await asyncio.sleep(RETRY_DELAY)

    def _handle_loss(self, request: Request, replica: Replica, died: ReplicaDied) -> None:
        """Record that a request's replica died; raise the request's error unless the request may be retried.

        Raises:
            ServiceStopped: the service was stopped.
            PoisonRequest: the request seems to kill its replicas.
            ReplicaDied: the retries are used up.
        """
        if self._stopped:
            raise ServiceStopped(f"{self._name} was stopped")

        request.avoid.add(replica.index)
        if not replica.blameless:
            request.record_death(replica.suspects)
            # Replicas that are killed from outside within seconds have served it for longer: one more must die.
            is_blamed = max(request.sudden_deaths, request.deaths - 1) >= self._options.quarantine_after
            if is_blamed and replica.suspects == {request}:
                label = f"{self._name}.{request.endpoint} (request {request.id}, from {request.caller})"
                self._quarantined.append(label)
                raise PoisonRequest(
                    f"{label} is not retried, because {request.deaths} replicas died while they served it, the last "
                    f"one while it served nothing else. {died}"
                ) from died

        if request.attempts > self._options.retries:
            raise ReplicaDied(f"{request.endpoint} was sent {request.attempts} times, and its replica died: {died}")
        self._retried += 1
        record_metric(f"retries/{self._name}", 1.0, Reduce.SUM)

    async def _fan_out(self, call: Call) -> list[Value]:
        # Call all replicas, and return their values; an error of one is raised once all have answered.
        self._balancer.check_open()

        # For example, the trainer publishes its weights before generators are asked to load them.
        if call.endpoint in self.before_fanout:
            await self.before_fanout[call.endpoint](*call.args, **call.kwargs)
        is_catch_up = call.endpoint in self._catch_up
        previous_call = self._latest.get(call.endpoint)
        if is_catch_up:
            self._set_latest(call.endpoint, call)

        async def call_replica(supervisor: Supervisor, request: Request) -> list[Value] | None:
            async def acquire_replica(request: Request) -> Replica | None:
                try:
                    replica = await supervisor.when_up(request.time_left)
                except TimeoutError:
                    raise CallTimeout(
                        f"{request.caller} waited {request.limit:g} s for {supervisor.name}.{request.endpoint}, "
                        f"which is {supervisor.state}: {supervisor.error}"
                    ) from None

                if replica is not None:
                    replica.enter(request)
                return replica

            return await self._serve_request(request, acquire_replica, catch_up=is_catch_up)

        # A call that replicas catch up on is sent to those that serve. Any other call also waits for those that are
        # being replaced, except replicas that wait for a host, which may take hours; if none serves, it waits for all.
        serving = [supervisor for supervisor in self._supervisors if supervisor.state == "up"]
        recipients = serving
        if not is_catch_up:
            recipients = [
                supervisor for supervisor in self._supervisors if not serving or not supervisor.waits_for_host
            ]

        calls = [call_replica(supervisor, self._make_request(call)) for supervisor in recipients]
        with on_the_clock(f"{self._name}.{call.endpoint}"):
            replies = await asyncio.gather(*calls, return_exceptions=True)
        self._balancer.check_open()

        failures = [reply for reply in replies if isinstance(reply, BaseException)]
        if failures:
            # A new replica must not start with a call that raised on a living one.
            if is_catch_up and self._latest[call.endpoint] is call:
                self._set_latest(call.endpoint, previous_call)
            raise failures[0]

        return [reply[0] for reply in replies if isinstance(reply, list)]

    # Set the call of an endpoint that absent replicas catch up on; None if there is none.
    def _set_latest(self, endpoint: str, call: Call | None) -> None:
        # Removed first, so that it is the last one of the dict: replicas catch up on endpoints in the order of the
        # calls.
        self._latest.pop(endpoint, None)
        if call is not None:
            self._latest[endpoint] = call

    def _make_request(self, call: Call) -> Request:
        limit = self._options.call_timeout if call.timeout is None else call.timeout
        request_id = call.request_id or new_id(self._name)
        return Request(request_id, call.endpoint, call.args, call.kwargs, call.caller, limit, call.session)

    def _make_supervisor(self, index: int) -> Supervisor:
        # The replica serves once it has repeated the calls that all replicas must have seen.
        async def launch_replica(incarnation: int) -> Replica:
            replica = await self._launch(index, incarnation)

            # Repeat the latest call of each catch-up endpoint, and those that came meanwhile, until none is missed.
            caught_up: dict[str, Call] = {}
            while missed := [call for call in self._latest.values() if caught_up.get(call.endpoint) is not call]:
                for call in missed:
                    caught_up[call.endpoint] = call
                    request = self._make_request(call)
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
            index, f"{self._name}[{index}]", self._options, launch_replica, self._balancer, self._on_supervisor_failed
        )

    @contextmanager
    def waiting_for_host(self, index: int) -> Iterator[None]:
        """Exclude replica `index` from fanouts within the block, while it waits for a host, possibly for hours."""
        waiting = [supervisor for supervisor in self._supervisors if supervisor.index == index]
        for supervisor in waiting:
            supervisor.waits_for_host = True
        try:
            yield
        finally:
            for supervisor in waiting:
                supervisor.waits_for_host = False

    def is_only_replica(self, index: int) -> bool:
        """Return whether no replica except `index` serves, or whether replica `index` is starting for the first
        time."""
        states = {supervisor.index: supervisor.state for supervisor in self._supervisors}
        return states.pop(index, None) == "starting" or "up" not in states.values()  # `pop` leaves the others

    async def _retire_supervisor(self, supervisor: Supervisor) -> None:
        supervisor.retire()
        if supervisor.replica is not None:
            await self._balancer.drain(supervisor.replica, DRAIN_PATIENCE)
        await supervisor.stop()
        await self._release(self._name, supervisor.index)

    def _on_supervisor_failed(self, supervisor: Supervisor) -> None:
        def make_error() -> ReplicaDied:
            error = ReplicaDied(f"no replica of {self._name} is left. {supervisor.error}")
            error.__cause__ = supervisor.error
            return error

        if all(supervisor.state in ("failed", "stopped") for supervisor in self._supervisors):
            self._balancer.close(make_error)
            self._on_dead(make_error())
