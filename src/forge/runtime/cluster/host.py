"""The daemon of a machine, `forge worker`: it starts Monarch workers for one controller at a time, and holds its lease.

Monarch itself leaves the processes of a lost controller, or of a machine that was cut off, running for ever. Here they
end within LEASE seconds: a run that has replaced them never hears from them again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ...system.addresses import joined
from ...system.scratch import Scratch, sweep
from . import HOST, STORE
from .credentials import SECRET, Credentials
from .inventory import Inventory
from .listener import Listener
from .process import Process, descends, stacks
from .rendezvous import Boards
from .wire import LEASE, HostError, connect, pipe, receive, send

log = logging.getLogger(__name__)

LISTEN_TIMEOUT = 60.0  # seconds for a worker to come up
ENDING = LEASE - 0.5  # seconds that a controller waits for the end of the one before it
MEASURE_TIMEOUT = 60.0  # seconds for a measurement of bandwidth


class Daemon:
    """Of one machine.

    Args:
        gpus: what runs may use of its accelerators.
        secret: who has it may run anything here as this user.
        address: the address that it listens at.
        once: end after the first run.
    """

    def __init__(self, gpus: tuple[str, ...], secret: str, address: str, port: int, once: bool = False) -> None:
        self._once = once
        self.gpus, self.address, self.port = gpus, address, port
        self._leaving = False
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._session: Session | None = None
        self._boards = Boards()
        self._held = ExitStack()
        sweep()
        scratch = Scratch("forge-run-")
        self._held.callback(scratch.close)
        names = {socket.gethostname(), address}
        self.credentials = Credentials.make(secret, scratch.path, names)

    def leave(self) -> bool:
        """Tell the run that this machine will be taken away; whether there is one."""
        self._leaving = True
        if self._session is not None:
            self._session.leave()
        return self._session is not None

    async def gone(self) -> None:
        """Return when no run holds this machine."""
        if self._session is not None:
            await self._session.closed.wait()

    async def serve(self, ready: Any = None) -> None:
        """Serve until this task is cancelled; `ready(port)` is called once connections are accepted."""
        listener = Listener(self.address, self.port, self.credentials.context(server=True), self._serve_one)
        self.port = listener.port
        serving = asyncio.ensure_future(listener.serve())
        with self._held:
            try:
                if ready is not None:
                    ready(self.port)
                await self._over
            finally:
                if self._session is not None:
                    await self._session.close()
                serving.cancel()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = joined(*(writer.get_extra_info("peername") or ("?", 0))[:2])  # it may have gone already
        try:
            message = await receive(reader)
            match message and message.get("do"):
                case "describe":
                    held = self._session.holder if self._session else None
                    send(writer, {"ok": {**Inventory.of_this_machine(self.gpus).to_dict(), "held_by": held}})
                case "hold":
                    await self._hold(message or {}, reader, writer)
                case "board":
                    await self._boards.serve(reader, writer)
                case "sees":
                    send(writer, {"ok": await asyncio.to_thread(_sees, message["path"], message["content"])})  # type: ignore[index]
                case "sink":
                    await asyncio.wait_for(reader.readexactly(int(message["bytes"])), MEASURE_TIMEOUT)  # type: ignore[index]
                    send(writer, {"ok": True})
                case "measure":
                    send(writer, {"ok": await self._measure(message["peer"], int(message["bytes"]))})  # type: ignore[index]
                case "forward":
                    return await self._forward(int(message["port"]), reader, writer)  # type: ignore[index]
                case None:
                    pass
                case other:
                    send(writer, {"error": f"unknown request {other!r}: is another version of forge there?"})
            await writer.drain()
        except (TimeoutError, ValueError, KeyError, OSError, HostError, EOFError) as error:
            log.warning("%s: %s: %s", peer, type(error).__name__, error)
            send(writer, {"error": f"{type(error).__name__}: {error}"})
        finally:
            writer.close()

    async def _hold(self, message: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one controller until its connection is closed, or silent for LEASE seconds."""
        if self._leaving:
            send(writer, {"error": "it is being taken away"})
            return
        if self._session is not None:  # perhaps one that is just ending
            with suppress(TimeoutError):
                await asyncio.wait_for(self._session.closed.wait(), ENDING)
        if self._session is not None:
            send(writer, {"error": f"it is held by {self._session.holder}: end that run, or wait for its end"})
            return
        folder = message["folder"]
        if not os.path.isdir(folder):  # noqa: ASYNC240
            send(writer, {"error": f"it has no folder {folder}, in which the run was started: share it, or copy it"})
            return
        own = writer.get_extra_info("sockname")[:2]
        self._session = session = Session(message["who"], folder, message["environment"], own, self.credentials, writer)
        log.info("held by %s", session.holder)
        ended = "it closed the connection"
        try:
            send(
                writer, {"ok": {**Inventory.of_this_machine(self.gpus).to_dict(), "held_by": None, "at": joined(*own)}}
            )
            while (request := await receive(reader)) is not None:
                await session.take(request)
        except TimeoutError:
            ended = f"it was silent for {LEASE:g} s"
        except OSError as error:
            ended = f"the connection was lost ({error})"
        finally:
            count = len(session.workers)
            await session.close()
            self._session = None
            if self._once and not self._over.done():
                self._over.set_result(None)
            log.info("%s has gone: %s; %d workers of it were killed", session.holder, ended, count)

    async def _measure(self, peer: str, size: int) -> float:
        """Seconds to send so many bytes to another host."""
        reader, writer = await connect(peer, self.credentials)
        try:
            began = time.monotonic()
            send(writer, {"do": "sink", "bytes": size})
            block = bytes(1 << 20)
            for _ in range(size // len(block)):
                writer.write(block)
                await writer.drain()
            if await receive(reader, MEASURE_TIMEOUT) is None:
                raise ConnectionError(f"host {peer} closed the connection")
            return time.monotonic() - began
        finally:
            writer.close()

    async def _forward(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect a peer with a port of this machine's loopback, where a rank of the run listens."""
        if self._session is None:
            raise HostError("there is no run on this host")
        there, out = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pipe(reader, out), pipe(there, writer))


class Session:
    """A controller's hold on this machine: its workers and the processes that it watches.

    Args:
        own: the address and port of this daemon that the controller has reached.
    """

    def __init__(
        self,
        holder: str,
        folder: str,
        environment: dict[str, str],
        own: tuple[str, int],
        credentials: Credentials,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.holder, self.folder, self.own = holder, folder, own
        self.workers: dict[str, subprocess.Popen] = {}
        self._environment, self._credentials, self._writer = environment, credentials, writer
        self._watched: dict[int, Process] = {}
        self._working: set[asyncio.Task] = set()
        self.closed = asyncio.Event()
        self._scratch = Scratch("forge-run-")
        self._store = Scratch("forge-weights-", "/dev/shm" if os.access("/dev/shm", os.W_OK) else None)

    def leave(self) -> None:
        """Tell the controller that this machine will be taken away."""
        send(self._writer, {"event": "leaving"})

    async def take(self, request: dict[str, Any]) -> None:
        """Do what a message asks for; the answer is sent when it is there."""
        match request["do"]:
            case "beat":
                for worker in self.workers.values():
                    with suppress(BrokenPipeError):  # it has ended, and is reported below
                        assert worker.stdin is not None
                        worker.stdin.write(b"\n")
                for address in [address for address, worker in self.workers.items() if worker.poll() is not None]:
                    del self.workers[address]
                    send(self._writer, {"event": "ended", "worker": address})
                send(self._writer, {"event": "beat"})
            case _:
                task = asyncio.get_running_loop().create_task(self._answer(request))
                self._working.add(task)
                task.add_done_callback(self._working.discard)

    async def _answer(self, request: dict[str, Any]) -> None:
        try:
            answer = {"ok": await self._do(request["do"], request)}
        except (OSError, ValueError, KeyError, HostError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        send(self._writer, {"id": request["id"], **answer})

    async def _do(self, what: str, request: dict[str, Any]) -> Any:
        match what:
            case "start":
                return await self._start(request["identity"])
            case "stop":
                if (worker := self.workers.pop(request["worker"], None)) is not None:
                    worker.kill()
                    await asyncio.to_thread(worker.wait)
                return None
            case "watch":
                pid = int(request["pid"])
                if not any(descends(pid, worker.pid) for worker in self.workers.values()):
                    send(self._writer, {"event": "ended", "pid": pid})
                elif pid not in self._watched:
                    self._watched[pid] = Process(pid, lambda: self._ended(pid))
                return None
            case "kill":
                if (process := self._watched.get(int(request["pid"]))) is not None:
                    process.kill()
                return None
            case "stacks":
                process = self._watched.get(int(request["pid"]))
                return "  (it has ended)" if process is None else await stacks(process.pid)
            case other:
                raise ValueError(f"unknown request {other!r}: is another version of forge there?")

    def _ended(self, pid: int) -> None:
        self._watched.pop(pid, None)
        send(self._writer, {"event": "ended", "pid": pid})

    async def _start(self, identity: str) -> str:
        """Start a worker; returns its Monarch address once it listens."""
        family = socket.AF_INET6 if ":" in self.own[0] else socket.AF_INET
        with socket.create_server((self.own[0], 0), family=family) as probe:
            port = probe.getsockname()[1]
        # A new identity and a new port: a controller that has lost a worker can attach to no other one in its place.
        address = f"{identity}@tls://{joined(self.own[0], port)}"
        self.workers[address] = worker = self._spawn(address)
        try:
            await self._until_it_listens(worker, port)
        except BaseException:
            self.workers.pop(address, None)
            worker.kill()
            raise
        return address

    async def _until_it_listens(self, worker: subprocess.Popen, port: int) -> None:
        async with asyncio.timeout(LISTEN_TIMEOUT):
            while not listens(worker.pid, port):
                if worker.poll() is not None:
                    raise HostError(
                        f"the worker ended with {worker.returncode} before it listened; see its output there"
                    )
                await asyncio.sleep(0.05)

    def _spawn(self, address: str) -> subprocess.Popen:
        settings = {
            **os.environ,
            **self._environment,
            **self._credentials.environment,
            "TMPDIR": str(self._scratch.path),
            STORE: str(self._store.path),
            HOST: joined(*self.own),
        }
        settings.pop(SECRET, None)  # the certificate is enough for a process of the run
        command = [sys.executable, "-m", "forge.runtime.cluster.worker", str(os.getpid())]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=self.folder, env=settings, bufsize=0)
        assert worker.stdin is not None
        os.set_blocking(worker.stdin.fileno(), False)
        worker.stdin.write(f"{address}\n".encode())  # other users may read the arguments of a process
        return worker

    async def close(self) -> None:
        """Kill the workers and, through them, every process of the run on this machine."""
        workers, self.workers = self.workers, {}
        for worker in workers.values():
            worker.kill()
        for process in self._watched.values():
            process.kill()
            process.close()
        for task in self._working:
            task.cancel()
        for worker in workers.values():
            await asyncio.to_thread(worker.wait)
        self._scratch.close()
        self._store.close()
        self.closed.set()


def _sees(path: str, content: str) -> bool:
    """Whether a file of this machine has this content."""
    try:
        return Path(path).read_text() == content
    except OSError:
        return False


def routable() -> str:
    """An address of this machine that others reach: that of its name, or of the interface that leads elsewhere.

    Raises:
        OSError: it has none but the loopback.
    """
    with suppress(OSError):
        for *_, there in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM):
            if not str(there[0]).startswith("127."):
                return str(there[0])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # of no machine (RFC 5737); sends nothing
        return probe.getsockname()[0]
    raise OSError("this machine has no address but the loopback: give --listen ADDRESS")


def listens(pid: int, port: int) -> bool:
    """Whether a process of this machine listens at a TCP port."""
    for table in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        if any(row.split()[1].endswith(f":{port:04X}") and row.split()[3] == "0A" for row in rows):
            return True
    return False
