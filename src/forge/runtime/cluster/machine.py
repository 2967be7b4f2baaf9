"""The controller's end of a host: it holds the host's lease, starts workers there, and watches their processes."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from ...observability.console import log_failure
from ...system.masking import without_secrets
from .credentials import Credentials
from .inventory import Inventory
from .wire import BEAT, CONNECT_TIMEOUT, LEASE, HostError, connect, explained, receive, send

log = logging.getLogger(__name__)

REQUEST_TIMEOUT = 90.0  # seconds; starting a worker imports Monarch there
# What a host's processes take over from the controller's environment.
INHERITED = ("PYTHONPATH", "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "PYTHONUTF8", "TORCHSTORE_USE_RDMA")
INHERITED_PREFIXES = ("FORGE_", "HYPERACTOR_", "MONARCH_", "NCCL_", "ATEN_", "ONEDNN_")
NOT_INHERITED = ("FORGE_SECRET", "FORGE_HOSTS", "FORGE_HOST", "HYPERACTOR_TLS_CA", "HYPERACTOR_TLS_CERT")


async def describe(address: str, credentials: Credentials) -> tuple[Inventory, str | None]:
    """What a host has, and which controller holds it. OSError: it cannot be reached; says what to do."""
    reader, writer = await connect(address, credentials)
    try:
        send(writer, {"do": "describe"})
        return _described(await answer_of(reader, address))
    finally:
        writer.close()


async def answer_of(reader: asyncio.StreamReader, address: str, timeout: float | None = None) -> Any:
    """The answer to the first request of a connection: in TLS 1.3 only that shows whether this peer was accepted."""
    limit = timeout or CONNECT_TIMEOUT
    try:
        message = await receive(reader, limit)
    except TimeoutError:
        raise ConnectionError(f"host {address} gave no answer within {limit:g} s") from None
    except ConnectionResetError:  # it had closed the connection before the request arrived there
        message = None
    except OSError as error:
        raise explained(error, address) from None
    if message is None:
        raise ConnectionError(
            f"host {address} closed the connection without an answer: it does not accept this machine's certificate "
            "(another FORGE_SECRET, or clocks that are months apart), or it is ending; its log says which"
        )
    if "error" in message:
        raise HostError(f"host {address}: {message['error']}")
    return message["ok"]


def _described(answer: dict[str, Any]) -> tuple[Inventory, str | None]:
    holder = answer.pop("held_by")
    answer.pop("at", None)
    return Inventory.from_dict(answer), holder


@cache
def _line() -> asyncio.AbstractEventLoop:
    """The loop, in a thread of its own, that talks to the hosts: the lease must not depend on how long the controller's
    own loop is busy."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="forge-hosts", daemon=True).start()
    return loop


class Machine:
    """One host, held from `hold` on until it is lost or given back. Every hold is a new object.

    Args:
        address: HOST:PORT of its daemon.
    """

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.address = address
        self.inventory: Inventory
        self.at = address  # its address and port as its own processes, and other hosts, know it
        self._loop = asyncio.get_running_loop()
        self.ended: set[str] = set()  # workers, by address
        self.leaving = asyncio.Event()  # it will be taken away
        self.lost: asyncio.Future[str] = self._loop.create_future()  # why
        self._credentials = credentials
        self._ids = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._watched: dict[int, Callable[[], None]] = {}
        self._of_workers: dict[str, list[Callable[[], None]]] = {}
        self._tasks: list[asyncio.Task] = []  # of the line's loop
        self._telling: set[asyncio.Task] = set()

    def __str__(self) -> str:
        return f"{self.inventory.name} ({self.address})"

    async def hold(self) -> None:
        """Take it for this controller.

        Raises:
            OSError: it cannot be reached. HostError: another controller holds it, or it lacks this run's folder.
        """
        inherited = {
            name: value
            for name, value in os.environ.items()
            if (name in INHERITED or name.startswith(INHERITED_PREFIXES))
            and name not in NOT_INHERITED
            and "KEY" not in name
        }
        who = f"{socket.gethostname()} pid {os.getpid()}, {' '.join(without_secrets(sys.argv))[:200]}"
        wanted = {"do": "hold", "who": who, "folder": os.getcwd(), "environment": inherited}
        holding = asyncio.run_coroutine_threadsafe(self._hold(wanted), _line())
        self.inventory = await asyncio.wrap_future(holding)

    async def _hold(self, wanted: dict[str, Any]) -> Inventory:
        reader, self._writer = await connect(self.address, self._credentials)
        send(self._writer, wanted)
        try:
            answer = await answer_of(reader, self.address)
            self.at = answer["at"]
            inventory, _ = _described(answer)
        except BaseException:
            self._writer.close()
            raise
        for work in (self._listen(reader), self._beat()):
            task = asyncio.get_running_loop().create_task(work)
            task.add_done_callback(log_failure)
            self._tasks.append(task)
        return inventory

    async def request(self, what: str, **values: Any) -> Any:
        """Have the daemon do something; its answer.

        Raises:
            HostError: it could not, or the host was lost meanwhile.
        """
        if self.lost.done():
            raise HostError(f"host {self} was lost: {self.lost.result()}")
        number = next(self._ids)
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        _line().call_soon_threadsafe(send, self._writer, {"do": what, "id": number, **values})
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT):
                return await answer
        except TimeoutError:
            raise HostError(f"host {self} gave no answer to {what} within {REQUEST_TIMEOUT:g} s") from None
        finally:
            del self._answers[number]

    def tell(self, what: str, **values: Any) -> None:
        """The same without waiting; errors are logged."""

        async def ask() -> None:
            try:
                await self.request(what, **values)
            except HostError as error:
                log.debug("%s: %s", what, error)

        task = self._loop.create_task(ask())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    def end(self, level: int = logging.INFO, reason: str = "it was given back") -> None:
        """Give it back, or count it as lost: its daemon ends all processes of this controller when it sees the
        connection closed, or hears nothing for LEASE seconds."""
        if self.lost.done():
            return
        log.log(level, "host %s: %s", self, reason)
        self.lost.set_result(reason)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(HostError(f"host {self} was lost: {reason}"))
        watched, self._watched = self._watched, {}
        for ended in watched.values():
            ended()
        _line().call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        self._writer.transport.abort()  # nothing that is still buffered may arrive later
        for task in self._tasks:
            task.cancel()

    async def _beat(self) -> None:
        while True:
            send(self._writer, {"do": "beat"})
            await asyncio.sleep(BEAT)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        reason = "its daemon has ended"
        try:
            while (message := await receive(reader, LEASE)) is not None:
                if message.get("event") != "beat":
                    self._loop.call_soon_threadsafe(self._take, message)
        except TimeoutError:
            reason = f"it was silent for {LEASE:g} s"
        except (OSError, ValueError) as error:
            reason = f"the connection was lost ({error})"
        with suppress(RuntimeError):  # the run has ended, and its loop with it
            self._loop.call_soon_threadsafe(self.end, logging.WARNING, reason)

    def _take(self, message: dict[str, Any]) -> None:
        if message.get("event") == "leaving":
            log.warning("host %s will be taken away", self)
            self.leaving.set()
        if "id" not in message:
            if "worker" in message:
                self.ended.add(message["worker"])
                for call in self._of_workers.pop(message["worker"], ()):
                    call()
            if (ended := self._watched.pop(message.get("pid", -1), None)) is not None:
                ended()
            return
        answer = self._answers.get(message["id"])
        if answer is not None and not answer.done():
            if "error" in message:
                answer.set_exception(HostError(f"host {self}: {message['error']}"))
            else:
                answer.set_result(message["ok"])

    def watch(self, pid: int, ended: Callable[[], None]) -> None:
        """Have `ended` called when a process there has ended, or this host is lost."""
        if self.lost.done():
            asyncio.get_running_loop().call_soon(ended)
            return
        self._watched[pid] = ended
        self.tell("watch", pid=pid)

    def when_worker_ends(self, worker: str, call: Callable[[], None]) -> None:
        """Have `call` called when a worker there has ended without having been stopped; at once if it has."""
        if worker in self.ended:
            asyncio.get_running_loop().call_soon(call)
            return
        self._of_workers.setdefault(worker, []).append(call)

    def forget_worker(self, worker: str) -> None:
        """It was stopped."""
        self._of_workers.pop(worker, None)

    def unwatch(self, pid: int) -> None:
        """No longer report the end of a process."""
        self._watched.pop(pid, None)


class RemoteProcess:
    """A process of another machine, as `Process` is one of this machine."""

    stopped = False  # the daemon's lease, and pings, notice what matters

    def __init__(self, machine: Machine, pid: int, ended: Callable[[], None]) -> None:
        self.machine, self.pid = machine, pid
        machine.watch(pid, ended)

    def __str__(self) -> str:
        return f"{self.pid} on {self.machine.inventory.name}"

    def kill(self) -> None:
        """SIGKILL, by its daemon, if it has not ended yet."""
        if not self.machine.lost.done():
            self.machine.tell("kill", pid=self.pid)

    async def stacks(self) -> str:
        """The Python stack of each of its threads."""
        try:
            return await self.machine.request("stacks", pid=self.pid)
        except HostError as error:
            return f"  ({error})"

    def close(self) -> None:
        """Stop watching it."""
        self.machine.unwatch(self.pid)
