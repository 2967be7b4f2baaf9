"""Says who waits for whom when nothing moves, and shows where the process that is waited for stands."""

from __future__ import annotations

import asyncio
import shutil
import sysconfig
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .replica import Replica
from .request import Request
from .say import say

if TYPE_CHECKING:
    from .service import Service

CHECK_EVERY = 1.0
DUMP_PATIENCE = 15.0
MOST_WAITS_SHOWN = 5


class Watchdog:
    """Watches every wait of a run. A replica that has answered nothing for `stall_after` seconds while calls are in
    flight on it is reported, again after twice that time, and so on; so are calls that no replica takes, and replicas
    that do not come up.

    Args:
        services: those of the run by name, as they come and go.
        starting: replicas that are being started, and since when.
    """

    def __init__(self, services: Mapping[str, Service], starting: Mapping[Replica, float]) -> None:
        self.services, self.starting = services, starting
        self._patience: weakref.WeakKeyDictionary[object, float] = weakref.WeakKeyDictionary()

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(CHECK_EVERY)
            for replica, since in list(self.starting.items()):
                stalled = time.monotonic() - since
                if self._is_due(replica, stalled, replica.options.stall_after):
                    _report(f"{replica} has been starting for {stalled:.0f} s", await _places(replica))
            for service in list(self.services.values()):
                for slot in service._slots:
                    if slot.replica is not None and slot.replica.flights:
                        await self._check(slot.replica)
                self._check_queue(service)

    async def _check(self, replica: Replica) -> None:
        flights = list(replica.flights)
        since = max(replica.last_answer, min(flight.sent for flight in flights))
        if self._is_due(replica, time.monotonic() - since, replica.options.stall_after):
            lines = _waits(flights, str(replica)) + await _places(replica)
            _report(f"no answer from {replica} for {time.monotonic() - since:.0f} s", lines)

    def _check_queue(self, service: Service) -> None:
        queued = service._dispatcher.waiting()
        waited = time.monotonic() - queued[0].made if queued else 0.0
        if self._is_due(service, waited, service._options.stall_after):
            states = ", ".join(f"{slot.name} {slot.state}" for slot in service._slots)
            _report(f"no replica of {service._name} takes a call: {states}", _waits(queued, service._name))

    def _is_due(self, key: object, stalled: float, first: float) -> bool:
        if stalled < first:
            self._patience.pop(key, None)
            return False
        due = stalled >= self._patience.setdefault(key, first)
        if due:
            self._patience[key] = 2 * stalled
        return due


async def _places(replica: Replica) -> list[str]:
    lines = []
    for pid in replica.pids:
        lines += [f"where process {pid} of {replica} stands:", await stacks(pid)]
    return lines


async def stacks(pid: int) -> str:
    """The Python stack of every thread of a process, as py-spy sees it without stopping it; or why there is none."""
    program = shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")
    if program is None:
        return "  (py-spy is not installed)"
    command = (program, "dump", "--nonblocking", "--pid", str(pid))
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        return f"  (py-spy could not be started: {error})"
    try:
        out, wrong = await asyncio.wait_for(process.communicate(), DUMP_PATIENCE)
    except TimeoutError:
        return f"  (py-spy gave no answer within {DUMP_PATIENCE:g} s)"
    finally:
        if process.returncode is None:
            process.kill()
    text = out.decode(errors="replace") if process.returncode == 0 else f"(py-spy failed: {wrong.decode().strip()})"
    return "\n".join(f"  {line}" for line in text.strip().splitlines())


def _waits(requests: list[Request], target: str) -> list[str]:
    now = time.monotonic()
    shown = [
        f"{r.caller} waits for {target}.{r.endpoint} since {_clock(now - r.made)} ({now - r.made:.0f} of {r.limit:g} s)"
        for r in sorted(requests, key=lambda r: r.made)[:MOST_WAITS_SHOWN]
    ]
    more = len(requests) - len(shown)
    return shown + ([f"and {more} calls more"] if more else [])


def _clock(ago: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time.time() - ago))


def _report(title: str, lines: list[str]) -> None:
    say("\n".join([title, *(f"  {line}" for line in lines)]))
