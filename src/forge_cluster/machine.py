"""The controller's side of a host: it holds the host's lease, starts workers on it, and watches their processes."""

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

from forge.observability.console import log_failure
from forge.runtime.process import Activity
from forge.system.masking import without_secrets

from .credentials import Credentials
from .inventory import Inventory
from .wire import (
    BEAT,
    CONNECT_TIMEOUT,
    LEASE,
    HostError,
    Json,
    Message,
    connect_host,
    receive_message,
    send_message,
    with_fix,
)

log = logging.getLogger(f"forge.{__name__}")

REQUEST_TIMEOUT = 90.0  # seconds; starting a worker imports Monarch, which takes tens of seconds from a cold disk
# Variables of the controller's environment that are passed on to a host's processes.
INHERITED = ("PYTHONPATH", "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "PYTHONUTF8", "TORCHSTORE_USE_RDMA")
# Settings that a process on another machine gets too; all others are of this machine.
INHERITED_PREFIXES = ("FORGE_", "HYPERACTOR_", "MONARCH_", "NCCL_", "ATEN_", "ONEDNN_")
# Of these, each machine has its own.
NOT_INHERITED = ("FORGE_SECRET", "FORGE_HOSTS", "FORGE_HOST", "HYPERACTOR_TLS_CA", "HYPERACTOR_TLS_CERT")


async def describe_host(address: str, credentials: Credentials) -> tuple[Inventory, str | None]:
    """Return the inventory of a host and the controller that holds it. OSError: it is unreachable; says what to do."""
    return _parse_description(await query_host(address, credentials, do="describe"))


async def query_host(address: str, credentials: Credentials, **message: Json) -> Json:
    """Send a message to a host's daemon and return its answer.

    Raises:
        OSError, HostError: it cannot be reached, or reported an error.
    """
    reader, writer = await connect_host(address, credentials)
    try:
        send_message(writer, message)
        return await first_answer(reader, address)
    finally:
        writer.close()


async def first_answer(reader: asyncio.StreamReader, address: str) -> Json:
    """Return the first answer on a connection. In TLS 1.3 only it shows whether this peer was accepted."""
    try:
        message = await receive_message(reader, CONNECT_TIMEOUT)
    except TimeoutError:
        raise ConnectionError(f"host {address} gave no answer within {CONNECT_TIMEOUT:g} s") from None
    except ConnectionResetError:  # it closed the connection before the request arrived
        message = None
    except OSError as error:
        raise with_fix(error, address) from None

    if message is None:
        raise ConnectionError(
            f"host {address} closed the connection without an answer: it does not accept this machine's certificate "
            "(another FORGE_SECRET, or clocks that are months apart), or it is ending; its log says which"
        )

    if "error" in message:
        raise HostError(f"host {address}: {message['error']}")
    return message["ok"]


def _parse_description(reply: Message) -> tuple[Inventory, str | None]:
    holder = reply.pop("held_by")
    reply.pop("at", None)
    return Inventory.from_dict(reply), holder


@cache
def _hosts_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that talks to the hosts, in a separate thread: the lease must not depend on how long the
    controller's main loop is busy."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="forge-hosts", daemon=True).start()
    return loop


class Machine:
    """One host, leased from `lease` on until it is lost or released. Every lease is a new object.

    Args:
        address: HOST:PORT of its daemon.
    """

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.address = address
        self.inventory: Inventory
        self.leased = False
        self.peer_address = address  # its address and port, as its processes and other hosts see it
        self._loop = asyncio.get_running_loop()
        self.ended: set[str] = set()  # workers, by address
        self.leaving = asyncio.Event()  # it will be taken away
        self.lost: asyncio.Future[str] = self._loop.create_future()  # with the reason

        self._credentials = credentials
        self._ids = itertools.count()
        self._answers: dict[int, asyncio.Future[Json]] = {}
        self._watched: dict[int, Callable[[], None]] = {}
        self._on_worker_end: dict[str, list[Callable[[], None]]] = {}
        self._tasks: list[asyncio.Task] = []  # of the hosts' loop
        self._sending: set[asyncio.Task] = set()

    def __str__(self) -> str:
        return f"{self.inventory.name} ({self.address})"

    async def lease(self) -> None:
        """Lease the host for this controller.

        Raises:
            OSError: it cannot be reached. HostError: another controller holds it, or it lacks this run's folder.
        """
        # API keys in the environment stay on this machine.
        inherited = {
            name: value
            for name, value in os.environ.items()
            if (name in INHERITED or name.startswith(INHERITED_PREFIXES))
            and name not in NOT_INHERITED
            and "KEY" not in name
        }
        holder = f"{socket.gethostname()} pid {os.getpid()}, {' '.join(without_secrets(sys.argv))[:200]}"
        request = {"do": "hold", "who": holder, "folder": os.getcwd(), "environment": inherited}
        leasing = asyncio.run_coroutine_threadsafe(self._lease_host(request), _hosts_loop())
        self.inventory = await asyncio.wrap_future(leasing)
        self.leased = True

    async def _lease_host(self, request: Message) -> Inventory:
        reader, self._writer = await connect_host(self.address, self._credentials)
        send_message(self._writer, request)
        try:
            reply = await first_answer(reader, self.address)
            self.peer_address = reply["at"]
            inventory, _ = _parse_description(reply)
        except BaseException:
            self._writer.close()
            raise

        # One task reads what the host sends, the other tells it that this side is alive.
        for work in (self._receive_messages(reader), self._send_beats()):
            task = asyncio.get_running_loop().create_task(work)
            task.add_done_callback(log_failure)
            self._tasks.append(task)

        return inventory

    async def request(self, action: str, **values: Json) -> Json:
        """Send a request to the daemon and return its answer.

        Raises:
            HostError: it failed, or the host was lost meanwhile.
        """
        if self.lost.done():
            raise HostError(f"host {self} was lost: {self.lost.result()}")

        # Answers come in any order, since a start takes longer than a question: each has the number of its request.
        number = next(self._ids)
        reply = asyncio.get_running_loop().create_future()
        self._answers[number] = reply

        # The connection belongs to the loop of hosts, which no actor of this process can delay.
        _hosts_loop().call_soon_threadsafe(send_message, self._writer, {"do": action, "id": number, **values})
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT):
                return await reply
        except TimeoutError:
            raise HostError(f"host {self} gave no answer to {action} within {REQUEST_TIMEOUT:g} s") from None
        finally:
            del self._answers[number]

    def send(self, action: str, **values: Json) -> None:
        """Send a request without waiting for its answer; errors are logged."""

        async def request_quietly() -> None:
            try:
                await self.request(action, **values)
            except HostError as error:
                log.debug("%s: %s", action, error)

        task = self._loop.create_task(request_quietly())
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    def end(self, level: int = logging.INFO, reason: str = "it was given back") -> None:
        """End the lease, or count the host as lost: its daemon ends all processes of this controller when it sees the
        connection closed, or hears nothing for LEASE seconds."""
        if self.lost.done():
            return
        log.log(level, "host %s: %s", self, reason)
        self.lost.set_result(reason)
        for reply in self._answers.values():
            if not reply.done():
                reply.set_exception(HostError(f"host {self} was lost: {reason}"))
        watched = self._watched
        self._watched = {}
        for on_end in watched.values():
            on_end()
        _hosts_loop().call_soon_threadsafe(self._abort_connection)

    def _abort_connection(self) -> None:
        self._writer.transport.abort()  # buffered messages must not arrive later
        for task in self._tasks:
            task.cancel()

    async def _send_beats(self) -> None:
        while True:
            send_message(self._writer, {"do": "beat"})
            await asyncio.sleep(BEAT)

    async def _receive_messages(self, reader: asyncio.StreamReader) -> None:
        reason = "its daemon has ended"
        try:
            while (message := await receive_message(reader, LEASE)) is not None:
                if message.get("event") != "beat":
                    self._loop.call_soon_threadsafe(self._handle_message, message)
        except TimeoutError:
            reason = f"it was silent for {LEASE:g} s"
        except (OSError, ValueError) as error:
            reason = f"the connection was lost ({error})"
        with suppress(RuntimeError):  # the run and its loop have ended
            self._loop.call_soon_threadsafe(self.end, logging.WARNING, reason)

    def _handle_message(self, message: Message) -> None:
        if message.get("event") == "leaving":
            log.warning("host %s will be taken away", self)
            self.leaving.set()

        # Messages without an id are events, all others are answers to requests.
        if "id" not in message:
            if "worker" in message:
                self.ended.add(message["worker"])
                for on_end in self._on_worker_end.pop(message["worker"], ()):
                    on_end()
            on_process_end = self._watched.pop(message.get("pid", -1), None)
            if on_process_end is not None:
                on_process_end()
            return

        reply = self._answers.get(message["id"])
        if reply is not None and not reply.done():
            if "error" in message:
                reply.set_exception(HostError(f"host {self}: {message['error']}"))
            else:
                reply.set_result(message["ok"])

    def watch(self, pid: int, on_end: Callable[[], None]) -> None:
        """Call `on_end` when a process on this host has ended, or the host is lost."""
        if self.lost.done():
            asyncio.get_running_loop().call_soon(on_end)
            return
        self._watched[pid] = on_end
        self.send("watch", pid=pid)

    def when_worker_ends(self, worker: str, on_end: Callable[[], None]) -> None:
        """Call `on_end` when a worker on this host has ended without having been stopped; at once if it has."""
        if worker in self.ended:
            asyncio.get_running_loop().call_soon(on_end)
            return
        self._on_worker_end.setdefault(worker, []).append(on_end)

    def forget_worker(self, worker: str) -> None:
        """Forget a worker that was stopped."""
        self._on_worker_end.pop(worker, None)

    def unwatch(self, pid: int) -> None:
        """Stop watching a process."""
        self._watched.pop(pid, None)


class RemoteProcess:
    """A process of another machine, with the interface of `Process`."""

    # Both unknown from afar; the lease and pings notice the effects.
    stopped = False
    alive = False

    def __init__(self, machine: Machine, pid: int, ended: Callable[[], None]) -> None:
        self.machine = machine
        self.pid = pid
        machine.watch(pid, ended)

    def __str__(self) -> str:
        return f"{self.pid} on {self.machine.inventory.name}"

    def kill(self) -> None:
        """Ask its daemon to send SIGKILL, if the process has not exited yet."""
        if not self.machine.lost.done():
            self.machine.send("kill", pid=self.pid)

    async def activity(self) -> Activity | None:
        """Return the activity that its machine's daemon reports; None if the daemon does not answer."""
        try:
            return Activity(*await self.machine.request("activity", pid=self.pid))
        except HostError:
            return None

    async def stacks(self) -> str:
        """Return the Python stack of each of its threads."""
        try:
            return await self.machine.request("stacks", pid=self.pid)
        except HostError as error:
            return f"  ({error})"

    def close(self) -> None:
        """Stop watching it."""
        self.machine.unwatch(self.pid)
