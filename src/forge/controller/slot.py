"""One place in a service, and the watch that keeps a living replica in it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from ..observability.metrics import Reduce, record_metric
from .errors import ForgeError, Unrecoverable
from .options import Options
from .replica import Replica

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
        name: str,
        options: Options,
        launch: Callable[[int], Awaitable[Replica]],
        on_up: Callable[[Replica], None],
        on_down: Callable[[Replica], None],
        on_failed: Callable[[Slot], None],
    ) -> None:
        self.name, self.options, self._launch = name, options, launch
        self._on_up, self._on_down, self._on_failed = on_up, on_down, on_failed
        self.state: State = "starting"
        self.replica: Replica | None = None
        self.restarts = 0
        self.error: BaseException | None = None
        self._up_since = 0.0
        self._changed = asyncio.Event()
        self._keeper: asyncio.Task | None = None

    async def start(self) -> None:
        """Bring up the first replica; what its setup raises is raised here."""
        self._set_up(await self._launch(0))
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def when_up(self, limit: float) -> Replica:
        """The replica, once there is one that serves.

        Raises:
            TimeoutError: none came up in time.
            ForgeError: none ever will.
        """
        async with asyncio.timeout(limit):
            while self.state != "up" or self.replica is None:
                if self.state in ("failed", "stopped"):
                    raise ForgeError(f"{self.name} will not come up again: {self.error or self.state}")
                self._changed.clear()
                await self._changed.wait()
        return self.replica

    async def stop(self) -> None:
        """End the watch and the replica."""
        self.state = "stopped"
        self._changed.set()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self.replica is not None:
            self._on_down(self.replica)
            await self.replica.stop()

    def _set_up(self, replica: Replica) -> None:
        self.replica, self.state, self._up_since = replica, "up", time.monotonic()
        self._on_up(replica)
        self._changed.set()

    async def _keep(self) -> None:
        failures = 0
        while self.replica is not None:
            died = await asyncio.shield(self.replica.failed)
            lost, self.state = self.replica, "restarting"
            self._on_down(lost)
            self.error = died
            failures = 0 if time.monotonic() - self._up_since > SOUND_AFTER else failures + 1
            _say(f"{died}; calls in flight there: {lost.casualties}")
            burial = asyncio.ensure_future(lost.stop())
            while failures <= self.options.max_restarts and self.options.max_restarts:
                await asyncio.sleep(0.0 if not failures else min(MOST_BACK_OFF, 0.25 * 2.0**failures))
                since = time.monotonic()
                try:
                    replica = await self._launch(self.restarts + 1)
                except Unrecoverable as error:
                    self.error = error
                    break
                except Exception as error:
                    self.error, failures = error, failures + 1
                    _say(f"{self.name} could not be replaced ({type(error).__name__}: {error})")
                    continue
                self.restarts += 1
                record_metric(f"restarts/{self.name.partition('[')[0]}", 1.0, Reduce.SUM)
                self._set_up(replica)
                _say(f"{self.name} serves again, {time.monotonic() - since:.1f} s after its start")
                break
            await asyncio.gather(burial, return_exceptions=True)
            if self.state != "up":
                self.state = "failed"
                self._changed.set()
                self._on_failed(self)
                return


def _say(text: str) -> None:
    print(f"forge: {text}", file=sys.stderr, flush=True)
