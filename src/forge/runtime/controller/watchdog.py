"""Logs who waits for whom when nothing moves, with the stacks of the process that is waited for."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .replica import Replica
from .request import Request

if TYPE_CHECKING:
    from .service import Service

log = logging.getLogger(__name__)

CHECK_EVERY = 1.0
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
        self._due: weakref.WeakKeyDictionary[object, float] = weakref.WeakKeyDictionary()

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(CHECK_EVERY)
            for replica, since in list(self.starting.items()):
                stalled = time.monotonic() - since
                if self._is_due(replica, stalled, replica.options.stall_after):
                    limit = replica.options.setup_timeout
                    # A large model loads for minutes: its stacks say nothing before the start takes too long.
                    lines = await _stacks_of(replica) if stalled > limit / 2 else []
                    _report(f"{replica} has been starting for {stalled:.0f} s, of at most {limit:g}", lines)
            for service in list(self.services.values()):
                for supervisor in service._supervisors:
                    if (busy := supervisor.replica) is None or not busy.requests:
                        continue
                    requests = list(busy.requests)
                    since = max(busy.last_answer, min(request.sent for request in requests))
                    if self._is_due(busy, time.monotonic() - since, busy.options.stall_after):
                        lines = _waits(requests, str(busy)) + await _stacks_of(busy)
                        _report(f"no answer from {busy} for {time.monotonic() - since:.0f} s", lines)
                queued = service._balancer.queued
                waited = time.monotonic() - queued[0].made if queued else 0.0
                if self._is_due(service, waited, service._options.stall_after):
                    states = ", ".join(f"{supervisor.name} {supervisor.state}" for supervisor in service._supervisors)
                    _report(f"no replica of {service._name} takes a call: {states}", _waits(queued, service._name))

    def _is_due(self, key: object, stalled: float, first: float) -> bool:
        if stalled < first:
            self._due.pop(key, None)
            return False
        due = stalled >= self._due.setdefault(key, first)
        if due:
            self._due[key] = 2 * stalled
        return due


async def _stacks_of(replica: Replica) -> list[str]:
    lines = []
    for process in replica.group.processes:
        lines += [f"where process {process} of {replica} stands:", await process.stacks()]
    return lines


def _waits(requests: list[Request], target: str) -> list[str]:
    now, lines = time.monotonic(), []
    for r in sorted(requests, key=lambda r: r.made)[:MOST_WAITS_SHOWN]:
        waited = now - r.made
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited))
        lines.append(f"{r.caller} waits for {target}.{r.endpoint} since {since} ({waited:.0f} of {r.limit:g} s)")
    more = len(requests) - len(lines)
    return lines + ([f"and {more} calls more"] if more else [])


def _report(title: str, lines: list[str]) -> None:
    log.warning("%s", "\n".join([title, *(f"  {line}" for line in lines)]))
