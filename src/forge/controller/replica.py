"""One replica of a component: its processes, the calls in flight on them, and the watch over their health."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import cloudpickle

from . import processes
from ._monarch import ActorError, ProcMesh, SupervisionError
from .context import ActorContext
from .errors import CallTimeout, RemoteFailure, ReplicaDied
from .options import Options
from .shell import Answer, Shell

# Supervision reports a dead process in under a second and a stopped one in three; the ping is for what supervision
# cannot see (a component that holds the interpreter lock). Its patience is long because imports hold the lock too.
PING_EVERY = 1.0
PING_PATIENCE = 8.0

_spawned = itertools.count()


class Replica:
    """`options.procs` processes that act as one: a call goes to every rank, rank 0 speaks for all."""

    def __init__(self, context: ActorContext, options: Options, group: processes.ProcessGroup) -> None:
        self.context = context
        self.options = options
        self.group = group
        self.in_flight = 0
        self.served = 0
        self.pids: list[int] = []
        self.failed: asyncio.Future[ReplicaDied] = asyncio.get_running_loop().create_future()
        name = f"{context.component}_{context.replica}_{next(_spawned)}"
        self.shell = group.mesh.spawn(name, Shell, context)
        self._watch: asyncio.Task | None = None
        self.stopped = False

    def __str__(self) -> str:
        return f"{self.context.component}[{self.context.replica}]"

    async def start(self, definition: tuple[type, tuple, dict[str, Any]]) -> None:
        """Build the component on every rank.

        Raises:
            the exception that the component's `__init__` or `setup` raised; CallTimeout or ReplicaDied otherwise.
        """
        self.group.starting += 1
        try:
            await self._build(definition)
        finally:
            self.group.starting -= 1
        self._watch = asyncio.get_running_loop().create_task(self._watch_health())

    async def _build(self, definition: tuple[type, tuple, dict[str, Any]]) -> None:
        limit = self.options.setup_timeout
        try:
            self.pids = await self._all_ranks("start", "ping", timeout=limit)
        except ReplicaDied as error:
            raise ReplicaDied(f"{self} did not come up: {error}") from error
        rendezvous = None
        if self.options.procs > 1:
            first = self.shell.slice(procs=0).open_rendezvous.call_one("127.0.0.1").as_asyncio()
            rendezvous = _unwrap(await self._wait("rendezvous", first, limit))
        await self._all_ranks("setup", "start", cloudpickle.dumps(definition), rendezvous, timeout=limit)

    async def call(self, method: str, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
        """Call `method` on every rank; their values in rank order.

        Raises:
            what the method raised, ReplicaDied, or CallTimeout after `options.call_timeout` seconds.
        """
        self.in_flight += 1
        try:
            return await self._all_ranks(method, "invoke", method, args, kwargs, timeout=self.options.call_timeout)
        finally:
            self.in_flight -= 1
            self.served += 1

    async def drain_metrics(self) -> list[Any]:
        return await self._all_ranks("drain_metrics", "drain_metrics", timeout=self.options.call_timeout)

    async def stop(self) -> None:
        """Run `teardown`, end the processes, and kill what is left of them."""
        if self.stopped:
            return
        self.stopped = True
        if self._watch is not None:
            self._watch.cancel()
        if not self.failed.done():
            try:
                await self._all_ranks("teardown", "close", timeout=5.0)
            except Exception as error:
                # The run is over whatever a teardown does; what it raised is still told.
                print(f"{self}: teardown failed: {error}")
        if not self.group.shared:
            await stop_mesh(self.group.mesh, str(self), self.pids, gentle=not self.failed.done())

    async def _all_ranks(self, label: str, endpoint: str, *args: Any, timeout: float) -> list[Any]:
        """One message to every rank; the values in rank order. The first failure ends the wait for the others, which
        may be stuck in a collective with the rank that failed."""
        send = getattr(self.shell, endpoint)
        if self.options.procs == 1:
            return [_unwrap(await self._wait(label, send.call_one(*args).as_asyncio(), timeout))]
        answers = [answer.as_asyncio() for answer in send.stream(*args)]
        by_rank = await self._wait(label, _gather_by_rank(answers), timeout)
        return [by_rank[rank] for rank in range(self.options.procs)]

    async def _wait(self, label: str, answer, timeout: float) -> Any:
        """Wait for `answer`, the replica's failure, or the time limit, whichever is first."""
        since = time.monotonic()
        answer = asyncio.ensure_future(answer)
        try:
            await asyncio.wait({answer, self.failed}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            if self.failed.done():
                raise ReplicaDied(f"{self.failed.result()} (while {label} was in flight)")
            raise CallTimeout(
                f"{self}.{label} gave no answer to the controller within {time.monotonic() - since:.0f} s "
                f"(limit {timeout:g} s, pids {self.pids})"
            )
        except SupervisionError as error:
            raise self.fail(f"its process ended or stopped answering (seen while {label} was in flight)") from error
        except ActorError as error:
            raise self.fail(f"its process can no longer handle {label}") from error
        finally:
            # An answer that nobody waits for any more may still fail; that is not news.
            answer.add_done_callback(lambda late: late.cancelled() or late.exception())
            answer.cancel()

    def fail(self, reason: str) -> ReplicaDied:
        """Declare this replica dead: every call in flight on it ends now."""
        if not self.failed.done():
            pids = ", ".join(map(str, self.pids)) or "unknown"
            self.failed.set_result(ReplicaDied(f"{self} is dead (pid {pids}): {reason}"))
        return self.failed.result()

    async def _watch_health(self) -> None:
        while not self.failed.done():
            await asyncio.sleep(PING_EVERY)
            try:
                await self._all_ranks("ping", "ping", timeout=PING_PATIENCE)
            except CallTimeout:
                if self.group.starting:
                    continue
                self.fail(f"it did not answer a ping for {PING_PATIENCE:g} s")
            except ReplicaDied:
                return
            except Exception as error:
                self.fail(f"it could not be watched any more: {error!r}")


def _unwrap(answer: Answer) -> Any:
    _rank, value = answer
    if isinstance(value, RemoteFailure):
        raise value.to_exception()
    return value


async def _gather_by_rank(answers: list[Any]) -> dict[int, Any]:
    by_rank = {}
    try:
        for answer in asyncio.as_completed(answers):
            arrived = await answer
            by_rank[arrived[0]] = _unwrap(arrived)
    finally:
        for answer in answers:
            answer.cancel()
    return by_rank


async def stop_mesh(mesh: ProcMesh, name: str, pids: list[int], *, gentle: bool = True) -> None:
    """End a process mesh; SIGKILL first where a process cannot be expected to listen."""
    if not gentle:
        for pid in pids:
            processes.kill(pid)
    try:
        await asyncio.wait_for(mesh.stop().as_asyncio(), 8.0)
    except Exception as error:
        # A mesh with a dead process refuses to stop; its processes are what must go.
        if gentle:
            print(f"{name}: could not be stopped gently ({type(error).__name__}); killing it")
        for pid in pids:
            processes.kill(pid)
