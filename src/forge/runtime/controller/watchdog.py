"""Watchdog: when calls hang, logs who waits for whom, with the stacks of the process that gives no answer."""

import asyncio
import logging
import time
import weakref
from collections.abc import Mapping
from typing import Any

from .replica import Replica
from .types import Request

log = logging.getLogger(__name__)

CHECK_EVERY = 1.0  # seconds
MAX_WAITS_SHOWN = 5  # the oldest ones: there may be thousands


class Watchdog:
    """Reporter of hanging calls and process starts of a run, which writes to the run's log.

    It reports a replica that has answered no call for `stall_after` seconds while some are in flight, calls that no
    replica takes, and replicas that do not start. Each report is repeated after twice the time, and so on.

    Args:
        services: the services of the run (`Service`) by name; the mapping changes as they come and go.
        starting: the replicas that are starting, each with the time of its start on the monotonic clock.
    """

    def __init__(self, services: Mapping[str, Any], starting: Mapping[Replica, float]) -> None:
        self.services, self.starting = services, starting
        self._due: weakref.WeakKeyDictionary[object, float] = weakref.WeakKeyDictionary()

    async def watch(self) -> None:
        """Check all services every second, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_EVERY)

            # Replicas that do not start. Copies, as both mappings change while stacks are read.
            for replica, started in list(self.starting.items()):
                stalled = time.monotonic() - started
                if self._is_due(replica, stalled, replica.options.stall_after):
                    limit = replica.options.setup_timeout
                    # A large model loads for minutes: its stacks say nothing before the start takes too long.
                    lines = await _stacks_of(replica) if stalled > limit / 2 else []
                    _log_report(f"{replica} has been starting for {stalled:.0f} s, of at most {limit:g}", lines)

            # Replicas that answer none of their calls.
            for service in list(self.services.values()):
                for supervisor in service._supervisors:
                    serving: Replica | None = supervisor.replica
                    if serving is None or not serving.requests:
                        continue

                    # Silent since its last answer, or since the oldest request in flight if that came later.
                    requests = list(serving.requests)
                    silent_since = max(serving.last_answer, min(request.sent for request in requests))
                    if self._is_due(serving, time.monotonic() - silent_since, serving.options.stall_after):
                        lines = _describe_waits(requests, str(serving)) + await _stacks_of(serving)
                        _log_report(f"no answer from {serving} for {time.monotonic() - silent_since:.0f} s", lines)

                # Calls that no replica takes.
                queued = service._balancer.queued
                waited = time.monotonic() - queued[0].created if queued else 0.0
                if self._is_due(service, waited, service._options.stall_after):
                    states = ", ".join(f"{supervisor.name} {supervisor.state}" for supervisor in service._supervisors)
                    _log_report(
                        f"no replica of {service._name} takes a call: {states}", _describe_waits(queued, service._name)
                    )

    # Return whether a report is due for a stall of `key` that has lasted for `stalled` seconds.
    # The first one is due after `first` seconds, the others at doubling times: a run that hangs overnight must not
    # fill its log.
    def _is_due(self, key: object, stalled: float, first: float) -> bool:
        if stalled < first:
            self._due.pop(key, None)
            return False
        is_due = stalled >= self._due.setdefault(key, first)
        if is_due:
            self._due[key] = 2 * stalled
        return is_due


async def _stacks_of(replica: Replica) -> list[str]:
    return [
        line
        for process in replica.group.processes
        for line in (f"where process {process} of {replica} stands:", await process.stacks())
    ]


# Return a line for each of the oldest requests: who waits for `target`, since when and for how long.
def _describe_waits(requests: list[Request], target: str) -> list[str]:
    now = time.monotonic()
    lines = []
    for request in sorted(requests, key=lambda request: request.created)[:MAX_WAITS_SHOWN]:
        waited = now - request.created
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited))
        lines.append(
            f"{request.caller} waits for {target}.{request.endpoint} since {since} "
            f"({waited:.0f} of {request.limit:g} s)"
        )

    hidden_count = len(requests) - len(lines)
    return lines + ([f"and {hidden_count} calls more"] if hidden_count else [])


def _log_report(title: str, lines: list[str]) -> None:
    log.warning("%s", "\n".join([title, *(f"  {line}" for line in lines)]))
