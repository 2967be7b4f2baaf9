"""Supervision of one replica: replaces it when it dies, with growing pauses, up to a number of failures in a row."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from ...observability.console import log_failure
from ...observability.metrics import Reduce, record_metric
from .balance import LoadBalancer
from .errors import ReplicaDied, Unrecoverable
from .options import Options
from .replica import Replica
from .types import keep_until_done

log = logging.getLogger(__name__)

State = Literal["starting", "up", "restarting", "failed", "stopped"]

# Seconds after which a replica counts as sound: a later death is the first one of a new series.
SOUND_AFTER = 10.0
# Longest pause between attempts, in seconds. Longer ones would not help if the cause lasts: `max_restarts` ends them.
MAX_BACK_OFF = 10.0


class Supervisor:
    """Supervisor of replica `index` of a service, which replaces the replica when it dies.

    Args:
        launch: starts the replica of a given incarnation and returns it ready to serve, or raises and leaves no
            process.
        balancer: sends requests to the replica while it serves.
        on_failed: called with this supervisor when `max_restarts` is used up, or the replica's state is lost.

    Attributes:
        replica: the newest replica, which may be dead; None before the first one serves.
        restarts: number of replacements that served.
        error: why the replica was lost, or could not be replaced, the last time.
        waits_for_host: a replacement waits for a host, which may take hours.
    """

    def __init__(
        self,
        index: int,
        name: str,
        options: Options,
        launch: Callable[[int], Coroutine[Any, Any, Replica]],
        balancer: LoadBalancer,
        on_failed: "Callable[[Supervisor], None]",
    ) -> None:
        self.index, self.name, self.options = index, name, options
        self._launch, self._balancer, self._on_failed = launch, balancer, on_failed
        self.state: State = "starting"
        self.replica: Replica | None = None

        self.restarts = 0
        self.error: BaseException | None = None
        self.waits_for_host = False
        self.since = time.monotonic()  # when its state started
        self._changed = asyncio.Event()
        self._task: asyncio.Task | None = None
        self._pending_stops: set[asyncio.Future] = set()

    async def start(self) -> None:
        """Start the first replica and wait until it serves; its later replacements are started in the background.

        Raises:
            Exception: what the replica's setup raised.
        """

        async def launch_first() -> Replica:
            try:
                return await self._launch(0)
            except ReplicaDied as error:
                if not self.options.max_restarts:
                    raise
                # Its setup raised nothing: something outside killed the process. Try once more before it is an error.
                log.warning("%s; starting it again", error)
                return await self._launch(0)

        self._task = asyncio.create_task(launch_first())
        self._serve_replica(await self._task)
        self._task = asyncio.create_task(self._supervise_replica())
        self._task.add_done_callback(log_failure)

    def retire(self) -> None:
        """Stop starting replacements; the current replica continues to serve until `stop`."""
        self.state = "stopped"
        self._changed.set()

    async def when_up(self, limit: float) -> Replica | None:
        """Return the replica once it serves, after its replacement if need be; None if there will never be one.

        Raises:
            TimeoutError: none served within `limit` seconds.
        """
        async with asyncio.timeout(limit):
            while self.state != "up" or self.replica is None:
                if self.state in ("failed", "stopped"):
                    return None
                self._changed.clear()
                await self._changed.wait()
        return self.replica

    async def stop(self) -> None:
        """End the supervision, stop the replica, and wait until all earlier replicas have ended as well."""
        self.retire()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.replica is not None:
            self._balancer.leave(self.replica)
            await self.replica.stop()
        await asyncio.gather(*self._pending_stops, return_exceptions=True)

    def _serve_replica(self, replica: Replica) -> None:
        self.replica = replica
        self.state = "up"
        self.since = time.monotonic()
        self._balancer.join(replica)
        self._changed.set()

    async def _supervise_replica(self) -> None:
        # Replace each replica that dies, until the service stops it or no replacement serves.
        failures = 0
        while self.replica is not None:
            death = await asyncio.shield(self.replica.failed)
            lost = self.replica
            self._balancer.leave(lost)
            if self.state == "stopped":
                return

            failures = 0 if time.monotonic() - self.since > SOUND_AFTER else failures + 1
            self.state = "restarting"
            self.since = time.monotonic()
            self.error = death
            log.warning("%s; calls in flight there: %d", death, lost.in_flight_lost)

            # Its processes may take seconds to end: the replacement does not wait for that.
            keep_until_done(self._pending_stops, asyncio.ensure_future(lost.stop()))

            if not await self._replace_replica(failures):
                self.state = "failed"
                log.error("%s is given up: %s", self.name, self.error)
                self._changed.set()
                self._on_failed(self)
                return

    async def _replace_replica(self, failures: int) -> bool:
        """Start a replacement replica, with up to `max_restarts` attempts; return whether one serves.

        Args:
            failures: number of failures in a row so far: deaths soon after the start.
        """
        while self.options.max_restarts > 0 and failures <= self.options.max_restarts:
            await asyncio.sleep(min(MAX_BACK_OFF, 0.25 * 2.0**failures) if failures else 0.0)
            started = time.monotonic()
            try:
                replica = await self._launch(self.restarts + 1)
            except Unrecoverable as error:
                self.error = error
                return False
            except Exception as error:
                self.error = error
                failures += 1
                log.warning("%s could not be replaced (%s: %s)", self.name, type(error).__name__, error)
                continue

            self.restarts += 1
            record_metric(f"restarts/{self.name.partition('[')[0]}", 1.0, Reduce.SUM)
            self._serve_replica(replica)
            log.info("%s serves again, %.1f s after its start", self.name, time.monotonic() - started)
            return True

        return False
