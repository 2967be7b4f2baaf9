"""`forge worker`, the daemon of a machine: it starts Monarch workers for one controller at a time, under a lease.

Monarch itself leaves the processes running forever if their controller is lost or the network is cut. Here they end
within LEASE seconds, so that a run that has replaced them is not disturbed by them.
"""

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path

from forge.runtime.names import HOST, STORE
from forge.runtime.process import Process, activity_of, parents_of, read_stacks
from forge.system.scratch import Scratch, sweep_folders
from forge_http.addresses import join_address

from .credentials import SECRET, Credentials
from .inventory import Inventory
from .wire import CONNECT_TIMEOUT, LEASE, MAX_MESSAGE, HostError, Json, Message, receive_message, send_message

log = logging.getLogger(f"forge.{__name__}")


def _log_failure(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """Log in one line why a connection was not accepted."""
    error = context.get("exception")
    if isinstance(error, OSError):
        log.warning("a connection was not accepted: %s", str(error) or type(error).__name__)
    else:
        loop.default_exception_handler(context)


LISTEN_TIMEOUT = 60.0  # seconds for a worker to start
HANDOVER_TIMEOUT = LEASE - 0.5  # seconds that a controller waits for the end of the lease before its own


class Daemon:
    """The `forge worker` daemon of one machine.

    Args:
        gpus: names of the accelerators that runs may use.
        secret: of the run; a client that has it may run any program as this user.
        address: the address that it listens at.
        port: likewise; 0 for a free one.
    """

    def __init__(self, gpus: tuple[str, ...], secret: str, address: str, port: int) -> None:
        self.gpus, self.address, self.port = gpus, address, port
        self._leaving = False
        self._lease: HostLease | None = None
        self._resources = ExitStack()
        # Remove what an earlier daemon left when it was killed.
        sweep_folders()
        scratch = Scratch("forge-run-")
        self._resources.callback(scratch.close)
        self.credentials = Credentials.make(secret, scratch.path, {socket.gethostname(), address})

    def leave(self) -> bool:
        """Notify the run on this machine that the machine will be removed; return whether there is a run."""
        self._leaving = True
        if self._lease is not None:
            send_message(self._lease.writer, {"event": "leaving"})
        return self._lease is not None

    async def released(self) -> None:
        """Wait until no run leases this machine."""
        if self._lease is not None:
            await self._lease.closed.wait()

    async def serve(self, ready: Callable[[int], object] | None = None) -> None:
        """Serve until this task is cancelled; `ready(port)` is called once connections are accepted.

        Raises:
            OSError: the address is not available.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_log_failure)
        family, *_, endpoint = socket.getaddrinfo(self.address, self.port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(endpoint[:2], family=family, backlog=1024)  # type: ignore[arg-type]
        self.port = listener.getsockname()[1]

        with self._resources:
            server = await asyncio.start_server(
                self._serve_one,
                sock=listener,
                ssl=self.credentials.context(server=True),
                ssl_handshake_timeout=CONNECT_TIMEOUT,
                limit=MAX_MESSAGE,
            )
            try:
                if ready is not None:
                    ready(self.port)
                await loop.create_future()
            finally:
                if self._lease is not None:
                    await self._lease.close()
                server.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The name of the peer is unknown if it has already closed the connection.
        peer = join_address(*(writer.get_extra_info("peername") or ("?", 0))[:2])
        try:
            message = await receive_message(reader) or {}
            match message.get("do"):
                case "describe":
                    holder = self._lease.holder if self._lease else None
                    send_message(writer, {"ok": {**asdict(Inventory.of_this_machine(self.gpus)), "held_by": holder}})
                case "hold":
                    await self._serve_controller(message, reader, writer)
                case "sees":
                    has_content = False
                    with suppress(OSError):
                        has_content = await asyncio.to_thread(Path(message["path"]).read_text) == message["content"]
                    send_message(writer, {"ok": has_content})
                case None:
                    pass
                case unknown:
                    send_message(writer, {"error": f"unknown request {unknown!r}: use one version of forge"})

            await writer.drain()
        # A peer's error is logged and sent back: a daemon serves runs for months and must survive all of them.
        except (TimeoutError, ValueError, KeyError, OSError, HostError, EOFError) as error:
            log.warning("the request of %s failed: %s: %s", peer, type(error).__name__, error)
            send_message(writer, {"error": f"{type(error).__name__}: {error}"})
        finally:
            writer.close()

    async def _serve_controller(
        self, message: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Lease this machine to a controller until it closes its connection or is silent for LEASE seconds."""
        if self._leaving:
            send_message(writer, {"error": "it is being taken away"})
            return
        if self._lease is not None:  # perhaps one that is just ending
            with suppress(TimeoutError):
                await asyncio.wait_for(self._lease.closed.wait(), HANDOVER_TIMEOUT)
        if self._lease is not None:
            send_message(writer, {"error": f"it is held by {self._lease.holder}: end that run, or wait for its end"})
            return
        folder = message["folder"]
        if not os.path.isdir(folder):  # noqa: ASYNC240
            send_message(
                writer, {"error": f"it has no folder {folder}, in which the run was started: share it, or copy it"}
            )
            return

        # The address by which the controller reached this daemon is the one by which other hosts of the run do.
        address = writer.get_extra_info("sockname")[:2]
        lease = self._lease = HostLease(
            message["who"], folder, message["environment"], address, self.credentials, writer
        )
        log.info("held by %s", lease.holder)
        reason = "it closed the connection"
        try:
            inventory = asdict(Inventory.of_this_machine(self.gpus))
            send_message(writer, {"ok": {**inventory, "held_by": None, "at": join_address(*address)}})
            while (request := await receive_message(reader)) is not None:
                await lease.handle(request)
        except TimeoutError:
            reason = f"it was silent for {LEASE:g} s"
        except OSError as error:
            reason = f"the connection was lost ({error})"
        finally:
            count = len(lease.workers)
            await lease.close()
            self._lease = None
            log.info("%s disconnected: %s; its %d workers were killed", lease.holder, reason, count)


class HostLease:
    """A controller's lease of this machine: its workers and the processes that it watches.

    Args:
        holder: a text that names the controller.
        folder: the working directory of its processes.
        environment: variables of its processes.
        address: the address and port by which the controller has reached this daemon.
        writer: of the connection to the controller.
    """

    def __init__(
        self,
        holder: str,
        folder: str,
        environment: dict[str, str],
        address: tuple[str, int],
        credentials: Credentials,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.holder, self.folder, self.address = holder, folder, address
        self.workers: dict[str, subprocess.Popen] = {}
        self._environment, self._credentials, self.writer = environment, credentials, writer
        self._watched: dict[int, Process] = {}
        self._requests: set[asyncio.Task] = set()
        self.closed = asyncio.Event()
        self._scratch = Scratch("forge-run-")
        self._store = Scratch("forge-weights-", "/dev/shm" if os.access("/dev/shm", os.W_OK) else None)

    async def handle(self, request: Message) -> None:
        """Handle a message of the controller: a heartbeat immediately, a request in a task that sends the reply."""
        match request["do"]:
            case "beat":
                self._report_workers()
                send_message(self.writer, {"event": "beat"})
            case _:
                task = asyncio.get_running_loop().create_task(self._answer_request(request))
                self._requests.add(task)
                task.add_done_callback(self._requests.discard)

    async def _answer_request(self, request: Message) -> None:
        try:
            reply = {"ok": await self._do_action(request["do"], request)}
        except (OSError, ValueError, KeyError, HostError) as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        send_message(self.writer, {"id": request["id"], **reply})

    async def _do_action(self, action: str, request: Message) -> Json:
        process = self._watched.get(int(request.get("pid", 0)))
        match action:
            case "start":
                return await self._start_worker(request["identity"])
            case "port":
                return free_port(self.address[0])
            case "stop":
                # An unknown worker has already ended: the request may have crossed the message about its end.
                if (worker := self.workers.pop(request["worker"], None)) is not None:
                    worker.kill()
                    await asyncio.to_thread(worker.wait)
                return None
            case "watch":
                pid = int(request["pid"])
                # Only processes that are watched can be killed through this daemon, so only those of the run may be.
                if not any(worker.pid in parents_of(pid) for worker in self.workers.values()):
                    send_message(self.writer, {"event": "ended", "pid": pid})
                elif pid not in self._watched:
                    self._watched[pid] = Process(pid, lambda: self._report_end(pid))
                return None
            case "kill":
                if process is not None:
                    process.kill()
                return None
            case "activity":
                return [0.0, False] if process is None else list(activity_of(process.pid))
            case "stacks":
                return "  (it has ended)" if process is None else await read_stacks(process.pid)
            case unknown:
                raise ValueError(f"unknown request {unknown!r}: use one version of forge")

    def _report_workers(self) -> None:
        for address in [address for address, worker in self.workers.items() if worker.poll() is not None]:
            del self.workers[address]
            send_message(self.writer, {"event": "ended", "worker": address})

    def _report_end(self, pid: int) -> None:
        self._watched.pop(pid, None)
        # First, as the processes of a worker end with it: no other may be started by it.
        self._report_workers()
        send_message(self.writer, {"event": "ended", "pid": pid})

    async def _start_worker(self, identity: str) -> str:
        """Start a worker with a Monarch identity; return its Monarch address once it listens."""
        host, _ = self.address
        port = free_port(host)
        # With the same identity or port, a controller that has lost a worker could not attach to the new one.
        address = f"{identity}@tls://{join_address(host, port)}"
        worker = self.workers[address] = self._spawn_worker(address)
        try:
            async with asyncio.timeout(LISTEN_TIMEOUT):
                while not is_listening(worker.pid, port):
                    if worker.poll() is not None:
                        raise HostError(
                            f"the worker exited with status {worker.returncode} before it was ready: see its output "
                            "on that machine"
                        )
                    await asyncio.sleep(0.05)
        except BaseException:
            self.workers.pop(address, None)
            worker.kill()
            raise
        return address

    def _spawn_worker(self, address: str) -> subprocess.Popen:
        settings = {
            **os.environ,
            **self._environment,
            **self._credentials.environment,
            "TMPDIR": str(self._scratch.path),
            STORE: str(self._store.path),
            HOST: join_address(*self.address),
        }
        settings.pop(SECRET, None)  # the certificate is enough for a process of the run
        command = [sys.executable, "-m", "forge_cluster.worker", str(os.getpid())]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, cwd=self.folder, env=settings)
        with worker.stdin as pipe:  # type: ignore[union-attr]
            pipe.write(f"{address}\n")  # other users may read the arguments of a process
        return worker

    async def close(self) -> None:
        """Kill the workers, with which every process of the run on this machine ends, and remove their files."""
        workers, self.workers = self.workers, {}
        # All are killed before the first is waited for.
        for worker in workers.values():
            worker.kill()
        for process in self._watched.values():
            process.kill()
            process.close()
        for task in self._requests:
            task.cancel()
        for worker in workers.values():
            await asyncio.to_thread(worker.wait)
        self._scratch.close()
        self._store.close()
        self.closed.set()


def free_port(host: str) -> int:
    """Return a TCP port at which nothing listens now, at the address `host` of this machine."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        return probe.getsockname()[1]


def routable_address() -> str:
    """Return an address by which other machines reach this one: its name's, or the default route's interface's.

    Raises:
        OSError: this machine has only the loopback address.
    """
    with suppress(OSError):
        for *_, endpoint in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM):
            if not str(endpoint[0]).startswith("127."):
                return str(endpoint[0])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address of no machine (RFC 5737); sends nothing
        return probe.getsockname()[0]
    raise OSError("this machine has only the loopback address: pass --listen ADDRESS")


def is_listening(pid: int, port: int) -> bool:
    """Return whether a process of this machine listens at a TCP port."""
    for table in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        # Fields 1 and 3 of a row are the local address with the port, in hexadecimal, and the state: 0A is LISTEN.
        if any(row.split()[1].endswith(f":{port:04X}") and row.split()[3] == "0A" for row in rows):
            return True
    return False
