"""Watchdog: logs who waits for whom when nothing moves, with the stacks of the process that is waited for."""

import asyncio
import logging
import time
import weakref
from collections.abc import Mapping
from typing import Any

from .replica import Replica
from .types import Request

log = logging.getLogger(__name__)

CHECK_EVERY = 1.0
MAX_WAITS_SHOWN = 5  # of thousands, the oldest ones tell enough


class Watchdog:
    """Watches every wait of a run. A replica that has answered no call for `stall_after` seconds while some are in
    flight is reported, again after twice that time, and so on; so are calls that no replica takes, and replicas that do
    not start.

    Args:
        services: each `Service` of the run by name, as they come and go.
        starting: replicas that are starting, with the time of their start.
    """

    def __init__(self, services: Mapping[str, Any], starting: Mapping[Replica, float]) -> None:
        self.services = services
        self.starting = starting
        self._due: weakref.WeakKeyDictionary[object, float] = weakref.WeakKeyDictionary()

    async def watch(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(CHECK_EVERY)
            # Replicas that do not start.
            for replica, since in list(self.starting.items()):
                stalled = time.monotonic() - since
                if self._is_due(replica, stalled, replica.options.stall_after):
                    limit = replica.options.setup_timeout
                    # A large model loads for minutes: its stacks say nothing before the start takes too long.
                    lines = await _stacks_of(replica) if stalled > limit / 2 else []
                    _log_report(f"{replica} has been starting for {stalled:.0f} s, of at most {limit:g}", lines)

            # Replicas that answer none of their calls.
            for service in list(self.services.values()):
                for supervisor in service._supervisors:
                    busy = supervisor.replica
                    if busy is None or not busy.requests:
                        continue
                    requests = list(busy.requests)
                    since = max(busy.last_answer, min(request.sent for request in requests))
                    if self._is_due(busy, time.monotonic() - since, busy.options.stall_after):
                        lines = _find_waits(requests, str(busy)) + await _stacks_of(busy)
                        _log_report(f"no answer from {busy} for {time.monotonic() - since:.0f} s", lines)

                # Calls that no replica takes.
                queued = service._balancer.queued
                waited = time.monotonic() - queued[0].created if queued else 0.0
                if self._is_due(service, waited, service._options.stall_after):
                    states = ", ".join(f"{supervisor.name} {supervisor.state}" for supervisor in service._supervisors)
                    _log_report(
                        f"no replica of {service._name} takes a call: {states}", _find_waits(queued, service._name)
                    )

    def _is_due(self, key: object, stalled: float, first: float) -> bool:
        if stalled < first:
            self._due.pop(key, None)
            return False
        due = stalled >= self._due.setdefault(key, first)
        # Reports of one stall come at doubling times: a run that hangs overnight must not fill its log.
        if due:
            self._due[key] = 2 * stalled
        return due


async def _stacks_of(replica: Replica) -> list[str]:
    lines = []
    for process in replica.group.processes:
        lines += [f"where process {process} of {replica} stands:", await process.stacks()]
    return lines


def _find_waits(requests: list[Request], target: str) -> list[str]:
    now = time.monotonic()
    lines = []
    for request in sorted(requests, key=lambda request: request.created)[:MAX_WAITS_SHOWN]:
        waited = now - request.created
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited))
        lines.append(
            f"{request.caller} waits for {target}.{request.endpoint} since {since} "
            f"({waited:.0f} of {request.limit:g} s)"
        )
    hidden = len(requests) - len(lines)
    return lines + ([f"and {hidden} calls more"] if hidden else [])


def _log_report(title: str, lines: list[str]) -> None:
    log.warning("%s", "\n".join([title, *(f"  {line}" for line in lines)]))
