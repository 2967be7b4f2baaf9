"""One place in a service, and the watch that keeps a living replica in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from ..observability.metrics import Reduce, record_metric
from .errors import ReplicaDied, Unrecoverable
from .options import Options
from .replica import Replica
from .say import say, tell_end

State = Literal["starting", "up", "restarting", "failed", "stopped"]

# A replica that lived this long was sound: its death counts as the first of a new series.
SOUND_AFTER = 10.0
MOST_BACK_OFF = 10.0


class Slot:
    """Keeps one replica alive: when it dies, another is started with back-off, up to a cap.

    Args:
        launch: starts a replica of a given incarnation and returns it ready to serve, or raises and leaves nothing.
        on_up: called with a replica that serves from now on.
        on_down: called with a replica that no longer serves.
        on_failed: called when the slot was given up.
    """

    def __init__(
        self,
        index: int,
        name: str,
        options: Options,
        launch: Callable[[int], Coroutine[Any, Any, Replica]],
        on_up: Callable[[Replica], None],
        on_down: Callable[[Replica], None],
        on_failed: Callable[[Slot], None],
    ) -> None:
        self.index, self.name, self.options, self._launch = index, name, options, launch
        self._on_up, self._on_down, self._on_failed = on_up, on_down, on_failed
        self.state: State = "starting"
        self.replica: Replica | None = None
        self.restarts = 0
        self.error: BaseException | None = None
        self.since = time.monotonic()  # when it came into its state
        self._changed = asyncio.Event()
        self._keeper: asyncio.Task | None = None
        self._burials: set[asyncio.Future] = set()

    async def start(self) -> None:
        """Bring up the first replica; what its setup raises is raised here."""
        self._keeper = asyncio.get_running_loop().create_task(self._first())
        replica = await self._keeper
        self._set_up(replica)
        self._keeper = asyncio.get_running_loop().create_task(self._keep())
        self._keeper.add_done_callback(tell_end)

    async def _first(self) -> Replica:
        try:
            return await self._launch(0)
        except ReplicaDied as error:
            if not self.options.max_restarts:
                raise
            # Nothing that its setup raised: the process was lost from outside. Once more, then it is an error.
            say(f"{error}; starting it again")
            return await self._launch(0)

    def retire(self) -> None:
        """Start no further replica here; the one that serves goes on until `stop`."""
        self.state = "stopped"
        self._changed.set()

    async def when_up(self, limit: float) -> Replica | None:
        """The replica, once there is one that serves; None if there will never be one.

        Raises:
            TimeoutError: none came up in time.
        """
        async with asyncio.timeout(limit):
            while self.state != "up" or self.replica is None:
                if self.state in ("failed", "stopped"):
                    return None
                self._changed.clear()
                await self._changed.wait()
        return self.replica

    async def stop(self) -> None:
        """End the watch and the replica."""
        self.retire()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self.replica is not None:
            self._on_down(self.replica)
            await self.replica.stop()
        await asyncio.gather(*self._burials, return_exceptions=True)

    def _set_up(self, replica: Replica) -> None:
        self.replica, self.state, self.since = replica, "up", time.monotonic()
        self._on_up(replica)
        self._changed.set()

    async def _keep(self) -> None:
        failures = 0
        while self.replica is not None:
            died = await asyncio.shield(self.replica.failed)
            lost = self.replica
            self._on_down(lost)
            if self.state == "stopped":
                return
            failures = 0 if time.monotonic() - self.since > SOUND_AFTER else failures + 1
            self.state, self.since, self.error = "restarting", time.monotonic(), died
            say(f"{died}; calls in flight there: {lost.casualties}")
            burial = asyncio.ensure_future(lost.stop())
            self._burials.add(burial)
            burial.add_done_callback(self._burials.discard)
            if not await self._replace(failures):
                self.state = "failed"
                say(f"{self.name} is given up: {self.error}")
                self._changed.set()
                self._on_failed(self)
                return

    async def _replace(self, failures: int) -> bool:
        """Start another replica, again and again up to the cap; whether one serves."""
        while failures <= self.options.max_restarts and self.options.max_restarts:
            await asyncio.sleep(0.0 if not failures else min(MOST_BACK_OFF, 0.25 * 2.0**failures))
            started = time.monotonic()
            try:
                replica = await self._launch(self.restarts + 1)
            except Unrecoverable as error:
                self.error = error
                return False
            except Exception as error:
                self.error, failures = error, failures + 1
                say(f"{self.name} could not be replaced ({type(error).__name__}: {error})")
                continue
            self.restarts += 1
            record_metric(f"restarts/{self.name.partition('[')[0]}", 1.0, Reduce.SUM)
            self._set_up(replica)
            say(f"{self.name} serves again, {time.monotonic() - started:.1f} s after its start")
            return True
        return False
