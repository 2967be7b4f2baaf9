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
from forge.runtime.process import Activity, Process
from forge.system.masking import without_secrets

from .credentials import Credentials
from .inventory import Inventory
from .rooms import HostRoom
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
# Variables that start so are passed on too.
INHERITED_PREFIXES = ("FORGE_", "HYPERACTOR_", "MONARCH_", "NCCL_", "ATEN_", "ONEDNN_")
# Except these, of which each machine has its own.
NOT_INHERITED = ("FORGE_SECRET", "FORGE_HOSTS", "FORGE_HOST", "HYPERACTOR_TLS_CA", "HYPERACTOR_TLS_CERT")


async def query_host(address: str, credentials: Credentials, **message: Json) -> Json:
    """Send one message to a host's daemon, on a new connection, and return its answer.

    Raises:
        OSError: it cannot be reached.
        HostError: it reported an error.
    """
    reader, writer = await connect_host(address, credentials)
    try:
        send_message(writer, message)
        return await first_answer(reader, address)
    finally:
        writer.close()


async def first_answer(reader: asyncio.StreamReader, address: str) -> Json:
    """Return the first reply on a connection, which in TLS 1.3 also shows whether the host accepted this peer.

    Raises:
        OSError: it did not, or the connection is lost; the message has the fix.
        HostError: the host reported an error.
    """
    try:
        message = await receive_message(reader, CONNECT_TIMEOUT)
    except TimeoutError:
        raise ConnectionError(f"host {address} did not respond within {CONNECT_TIMEOUT:g} s") from None
    except ConnectionResetError:  # it closed the connection before the request arrived
        message = None
    except OSError as error:
        raise with_fix(error, address) from None

    if message is None:
        raise ConnectionError(
            f"host {address} closed the connection without a response: it rejects this machine's certificate "
            "(different FORGE_SECRET, or clocks months apart) or is shutting down; see its log"
        )

    if "error" in message:
        raise HostError(f"host {address}: {message['error']}")
    return message["ok"]


@cache
def _hosts_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of the connections to hosts, in a separate thread.

    So a lease does not end when the controller's main loop is busy for long.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="forge-hosts", daemon=True).start()
    return loop


class Machine:
    """Lease of one host by this controller, from `lease` until the host is lost or `end` is called.

    Args:
        address: HOST:PORT of the host's daemon.
    """

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.address = address
        self.leased = False
        self.peer_address = address  # its address and port, as its processes and other hosts see it
        self._loop = asyncio.get_running_loop()
        self.ended: set[str] = set()  # workers, by address
        self.leaving = asyncio.Event()  # it will be taken away
        self.lost: asyncio.Future[str] = self._loop.create_future()  # with the reason

        self._credentials = credentials
        self._ids = itertools.count()
        self._answers: dict[int, asyncio.Future[Json]] = {}
        self.watched: dict[int, Callable[[], None]] = {}  # by process: what is called at its end
        self._tasks: list[asyncio.Task] = []  # of the hosts' loop

    def __str__(self) -> str:
        return f"{self.inventory.name} ({self.address})"

    async def lease(self) -> None:
        """Lease the host for this controller.

        Raises:
            OSError: it cannot be reached.
            HostError: another controller leases it, or it does not see the folder of this run.
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
        self.room = HostRoom.of_host(self.inventory)  # what is free
        self.leased = True

    async def _lease_host(self, request: Message) -> Inventory:
        reader, self._writer = await connect_host(self.address, self._credentials)
        send_message(self._writer, request)
        try:
            reply = await first_answer(reader, self.address)
            self.peer_address = reply["at"]
            inventory = Inventory.from_dict(reply)
        except BaseException:
            self._writer.close()
            raise

        # One task reads what the host sends, the other shows it that this side is alive.
        for work in (self._receive_messages(reader), self._send_beats()):
            task = asyncio.get_running_loop().create_task(work)
            task.add_done_callback(log_failure)
            self._tasks.append(task)

        return inventory

    async def request(self, action: str, **values: Json) -> Json:
        """Send a request to the daemon of the leased host, and return its answer.

        Args:
            action: such as "start", see `forge_cluster.host.HostLease`.

        Raises:
            HostError: it failed, or the host was lost meanwhile.
        """
        if self.lost.done():
            raise HostError(f"host {self} was lost: {self.lost.result()}")

        # Each answer has the number of its request, as they come in any order.
        number = next(self._ids)
        reply = self._answers[number] = asyncio.get_running_loop().create_future()

        # The connection belongs to the loop of hosts, which no actor of this process can delay.
        _hosts_loop().call_soon_threadsafe(send_message, self._writer, {"do": action, "id": number, **values})
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT):
                return await reply
        except TimeoutError:
            raise HostError(f"host {self} did not respond to {action} within {REQUEST_TIMEOUT:g} s") from None
        finally:
            del self._answers[number]

    def send(self, action: str, **values: Json) -> None:
        """Send a request without waiting for its answer."""
        _hosts_loop().call_soon_threadsafe(send_message, self._writer, {"do": action, "id": next(self._ids), **values})

    def end(self, level: int = logging.INFO, reason: str = "it was given back") -> None:
        """End the lease: close the connection, and notify everything that waits for the host or watches its processes.

        The daemon then ends all processes of this controller, also if it only hears nothing for LEASE seconds.

        Args:
            level: of the log record about it.
            reason: why the lease ends.
        """
        if self.lost.done():
            return
        log.log(level, "host %s: %s", self, reason)
        self.lost.set_result(reason)
        for reply in self._answers.values():
            if not reply.done():
                reply.set_exception(HostError(f"host {self} was lost: {reason}"))
        watched, self.watched = self.watched, {}
        for on_end in watched.values():
            on_end()

        # Without sending buffered messages.
        _hosts_loop().call_soon_threadsafe(self._writer.transport.abort)
        for task in self._tasks:
            _hosts_loop().call_soon_threadsafe(task.cancel)

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
            log.warning("host %s will be removed soon", self)
            self.leaving.set()

        # Messages without an id are events, all others are answers to requests.
        if "id" not in message:
            if "worker" in message:
                self.ended.add(message["worker"])
            if (on_process_end := self.watched.pop(message.get("pid", -1), None)) is not None:
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
        self.watched[pid] = on_end
        self.send("watch", pid=pid)


class RemoteProcess(Process):
    """A process on another machine, which its daemon watches.

    Args:
        ended: called when the process ends.
    """

    # Unknown here; a process that hangs or is lost is noticed by pings and by the lease.
    stopped = False

    def __init__(self, machine: Machine, pid: int, ended: Callable[[], None]) -> None:
        self.machine, self.pid = machine, pid
        machine.watch(pid, ended)

    def __str__(self) -> str:
        return f"{self.pid} on {self.machine.inventory.name}"

    def kill(self) -> None:
        """Ask the daemon of its machine to send the process SIGKILL, unless it has ended."""
        if not self.machine.lost.done():
            self.machine.send("kill", pid=self.pid)

    async def activity(self) -> Activity | None:
        """Return the activity of the process by its machine's daemon; None if the daemon does not answer."""
        try:
            return Activity(*await self.machine.request("activity", pid=self.pid))
        except HostError:
            return None

    async def stacks(self) -> str:
        """Return the Python stacks of its threads as text, or the error of the daemon in parentheses."""
        try:
            return await self.machine.request("stacks", pid=self.pid)
        except HostError as error:
            return f"  ({error})"

    def close(self) -> None:
        """Stop watching the process."""
        self.machine.watched.pop(self.pid, None)
