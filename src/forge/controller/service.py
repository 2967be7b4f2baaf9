"""The service itself, in the controller: its slots, and what happens to a call whose replica is lost."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from ..observability.metrics import Reduce, record_metric
from .board import reference
from .dispatch import Dispatcher
from .errors import CallTimeout, ForgeError, PoisonRequest, ReplicaDied, ServiceStopped
from .handle import Call, Handle
from .replica import Component, Replica
from .request import Request, new_id
from .routers import resolve_router
from .slot import Slot

# How long a replica that `scale` removes may work on what it has begun.
DRAIN_PATIENCE = 30.0
# Before a request of a lost replica goes elsewhere: replicas that were lost at the same moment are known by then, and
# a request is not blamed for two deaths that it only saw.
DUST = 0.1


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
        self._dispatcher = Dispatcher(resolve_router(self._options.router), self._options.max_in_flight)
        self._slots: list[Slot] = []
        self._scaling = asyncio.Lock()
        self._retried = 0
        self._quarantined: list[str] = []
        self._stopped = False

    def __reduce__(self):
        return reference(self)

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
            await asyncio.gather(*(self._retire(slot) for slot in self._slots if slot.state == "failed"))
            living = [slot for slot in self._slots if slot.state != "stopped"]
            kept, removed = living[:num_replicas], living[num_replicas:]
            free = (index for index in itertools.count() if all(slot.index != index for slot in kept))
            added = [self._slot(next(free)) for _ in range(num_replicas - len(kept))]
            # Whoever looks meanwhile (a fanout, the watchdog, `stop`) sees those that are still starting.
            self._slots = sorted(kept + added, key=lambda slot: slot.index)
            try:
                results = await asyncio.gather(*(slot.start() for slot in added), return_exceptions=True)
                for error in results:
                    if isinstance(error, BaseException):
                        raise error
            except BaseException:
                self._slots = sorted({*self._slots, *removed} - {*added}, key=lambda slot: slot.index)
                await asyncio.shield(asyncio.gather(*(self._retire(slot) for slot in added)))
                raise
            await asyncio.gather(*(self._retire(slot) for slot in removed))

    def status(self) -> ServiceStatus:
        """How every replica is, and the queue."""
        rows = []
        for slot in self._slots:
            replica = slot.replica
            times = sorted(replica.latencies) if replica else []
            rows.append(
                ReplicaStatus(
                    slot.name,
                    slot.state,
                    replica.pids if replica else [],
                    replica.in_flight if replica else 0,
                    replica.served if replica else 0,
                    slot.restarts,
                    1e3 * statistics.median(times) if times else float("nan"),
                    1e3 * times[int(0.99 * len(times))] if times else float("nan"),
                    str(slot.error or ""),
                )
            )
        restarts = sum(row.restarts for row in rows)
        return ServiceStatus(
            self._name, rows, self._dispatcher.queued, restarts, self._retried, list(self._quarantined)
        )

    async def stop(self) -> None:
        """Stop every replica. Later calls raise ServiceStopped."""
        self._stopped = True
        self._dispatcher.close(self._was_stopped)
        await asyncio.gather(*(slot.stop() for slot in self._slots))
        await self._give_back(self._name, None)

    def _was_stopped(self) -> ServiceStopped:
        return ServiceStopped(f"{self._name} was stopped")

    def _check_runs(self) -> None:
        if self._stopped:
            raise self._was_stopped()
        self._dispatcher.check_open()

    async def _dispatch(self, call: Call) -> Any:
        self._check_runs()
        if call.verb == "route":
            return (await self._route(self._request(call)))[0]
        if call.verb == "fanout":
            return await self._fanout(call)
        if len(self._slots) != 1:
            raise ForgeError(
                f"{call.verb} addresses one actor mesh and {self._name} has {len(self._slots)} replicas: "
                "use route (one replica) or fanout (all)"
            )
        if call.verb == "call_one" and self._options.procs != 1:
            raise ForgeError(f"call_one needs one process and {self._name} has {self._options.procs}: use call")
        values = await self._route(self._request(call))
        return values[0] if call.verb == "call_one" else values

    def _end_session(self, session: str) -> None:
        self._dispatcher.end_session(session)

    async def _route(self, request: Request) -> list[Any]:
        while True:
            try:
                replica: Replica = await self._dispatcher.acquire(request)  # type: ignore[assignment]
            except TimeoutError:
                raise CallTimeout(
                    f"{request.caller} waited {request.limit:g} s for {self._name}.{request.endpoint} and no replica "
                    f"had room: {', '.join(f'{slot.name} {slot.state}' for slot in self._slots)}"
                ) from None
            if not replica.alive:  # it died between the choice and this moment
                request.attempts -= 1
                self._dispatcher.release(replica, request)
                continue
            try:
                return await replica.serve(request)
            except ReplicaDied as died:
                if replica.alive:
                    raise  # the endpoint itself raised it, about another service
                self._lost(request, replica, died)
            finally:
                self._dispatcher.release(replica, request)
            await asyncio.sleep(DUST)

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
        slots = [slot for slot in self._slots if slot.state == "up" or not catch_up]
        legs = [self._leg(slot, self._request(call), catch_up) for slot in slots]
        answers = await asyncio.gather(*legs, return_exceptions=True)
        self._check_runs()
        for answer in answers:
            if isinstance(answer, BaseException):
                if catch_up and self._latest[call.endpoint] is call:
                    # What a living replica refused must not be what the next one starts with.
                    self._latest.pop(call.endpoint)
                    if before is not None:
                        self._latest[call.endpoint] = before
                raise answer
        return [answer[0] for answer in answers if isinstance(answer, list)]

    async def _leg(self, slot: Slot, request: Request, catch_up: bool) -> list[Any] | None:
        """One replica's part of a fanout. None if it will catch up instead, or is no more."""
        while True:
            try:
                replica = await slot.when_up(request.left)
            except TimeoutError:
                raise CallTimeout(
                    f"{request.caller} waited {request.limit:g} s for {slot.name}.{request.endpoint}, "
                    f"which is {slot.state}: {slot.error}"
                ) from None
            if replica is None:
                return None
            if not replica.alive:  # its slot is about to notice
                await asyncio.sleep(DUST)
                continue
            replica.enter(request)
            try:
                return await replica.serve(request)
            except ReplicaDied as died:
                if replica.alive:
                    raise
                if catch_up:
                    return None
                self._lost(request, replica, died)
            finally:
                self._dispatcher.release(replica, request)
            await asyncio.sleep(DUST)

    def _request(self, call: Call) -> Request:
        limit = self._options.call_timeout if call.timeout is None else call.timeout
        request_id = call.request_id or new_id(self._name)
        return Request(request_id, call.endpoint, call.args, call.kwargs, call.caller, limit, call.session)

    def _slot(self, index: int) -> Slot:
        async def launch(incarnation: int) -> Replica:
            replica = await self._launch(index, incarnation)
            await self._bring_up_to_date(replica)
            return replica

        name = f"{self._name}[{index}]"
        return Slot(
            index, name, self._options, launch, self._dispatcher.join, self._dispatcher.leave, self._on_slot_failed
        )

    async def _bring_up_to_date(self, replica: Replica) -> None:
        """Repeat the last call of each endpoint that a replica must not miss, until none came meanwhile."""
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

    async def _retire(self, slot: Slot) -> None:
        slot.retire()
        if slot.replica is not None:
            await self._dispatcher.drain(slot.replica, DRAIN_PATIENCE)
        await slot.stop()
        await self._give_back(self._name, slot.index)

    def _on_slot_failed(self, slot: Slot) -> None:
        if all(other.state in ("failed", "stopped") for other in self._slots):
            self._dispatcher.close(lambda: self._nothing_left(slot))
            self._on_dead(self._nothing_left(slot))

    def _nothing_left(self, slot: Slot) -> ReplicaDied:
        error = ReplicaDied(f"no replica of {self._name} is left. {slot.error}")
        error.__cause__ = slot.error
        return error
