"""The parent of a program: reads the request, forks the program, monitors it, answers and exits.

Each request has its own keeper, so that programs cannot find others' data in its memory.
"""

from __future__ import annotations

import fcntl
import os
import re
import resource
import select
import signal
import socket
import struct
import time
from contextlib import suppress
from typing import Any

from . import bubblewrap, confine, limits, program, wire
from .place import Place
from .syscalls import prctl

_PATIENCE = 5.0  # seconds for killed processes to exit
_TICK = 0.05  # seconds between checks of memory and CPU time
_IDLE = 0.25  # the same, between the cells of a session
_SUBREAPER = 36
_CLOSED = b"closed"
_SENDER = struct.Struct("3i")  # process, user, group
_NO_MEMORY = re.compile(r"^[\w.]*MemoryError\b")


def keep(control: int, settings: dict[str, Any], place: Place, modules: dict[str, str]) -> None:
    """Serve one request from `control`, or a session; the caller then exits."""
    if settings["level"] == "namespaces":
        place.own(settings)
    looks = settings["level"] != "landlock"  # one process, bound by its own limits
    prctl(_SUBREAPER, 1)  # orphans are reparented to this process
    header, bodies = wire.unpack(lambda size: os.read(control, size))
    if header["kind"] == "run":
        running = Running(control, settings, place, modules, looks, bodies)
        return _answer(control, running, running.watch(header["time_limit"]))
    running = Running(control, settings, place, modules, looks, None)
    _send(control, {})
    while running.pid:
        over = running.rest()
        header, bodies = wire.unpack(lambda size: os.read(control, size))
        if over:
            return _send(control, {"over": over})
        running.clear()
        _answer(control, running, running.watch(header["time_limit"], bodies[0]))


class Running:
    """A program with its output, or a session if `given` is None.

    Attributes:
        pid: 0 after its end.
        begun: confinement succeeded.
    """

    def __init__(
        self,
        control: int,
        settings: dict[str, Any],
        place: Place,
        modules: dict[str, str],
        looks: bool,
        given: list[bytes] | None,
    ) -> None:
        self.control, self.settings, self.looks = control, settings, looks
        self.most = settings["output_kb"] << 10
        out, error, setup = (os.pipe() for _ in range(3))
        # The kernel adds the sender's process to each answer. A socket, unlike a pipe, is not opened a second time by
        # way of /proc, so that only this process writes cells.
        self.cells, cells = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.cells.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.cells.setblocking(False)
        self.speaker: int | None = None
        source, stdin = given or (b"", b"")
        self.began = time.monotonic()
        self.pid = os.fork()
        if not self.pid:
            try:
                for descriptor, number in ((_sealed(stdin), 0), (out[1], 1), (error[1], 2)):
                    os.dup2(descriptor, number)
                kept = (*place.kept, *(() if given else (cells.fileno(),)))
                if settings["level"] == "bubblewrap":
                    bubblewrap.execute(settings, modules, source, None if given else cells.fileno(), setup[1])

                def run() -> None:
                    if given:
                        program.run_program(source.decode("utf-8", "surrogatepass"))
                    else:
                        program.run_cells(cells.fileno())

                confine.confine(settings, place.rules, kept, run, setup[1])
            finally:
                os._exit(confine.SETUP_FAILED)
        cells.close()
        for descriptor in (out[1], error[1], setup[1]):
            os.close(descriptor)
        self.out, self.error, self.setup = out[0], error[0], setup[0]
        for descriptor in (self.out, self.error, self.setup):
            os.set_blocking(descriptor, False)
        self.exited = os.pidfd_open(self.pid)
        self.texts = {self.out: bytearray(), self.error: bytearray(), self.setup: bytearray()}
        self.ended: int | None = None
        self.cpu = self.cpu_before = 0.0  # of all its processes, when last seen

    @property
    def begun(self) -> bool:
        """Whether the confinement is complete and the program has started."""
        return bytes(self.texts[self.setup]) == confine.BEGUN

    def clear(self) -> None:
        """Forget output and times, before the next program of a session."""
        self.began, self.cpu_before = time.monotonic(), max(_cpu(), self.cpu)
        self.texts[self.out], self.texts[self.error] = bytearray(), bytearray()

    def watch(self, limit: float, cell: bytes | None = None) -> str:
        """Wait until it has exited ("exited"), answered a cell ("0", "1"), or was killed for exceeding a limit."""
        deadline = self.began + limit
        poll = select.poll()
        for descriptor in (self.control, self.exited, *self.texts, *(() if cell is None else (self.cells,))):
            poll.register(descriptor, select.POLLIN)
        mark = b"" if cell is None else self._pose(cell)
        status, look = "", self.began + _TICK
        while not status:
            left = deadline - time.monotonic()
            if left <= 0:
                status = "timeout"
                break
            ready = {descriptor for descriptor, _ in poll.poll(1000 * (min(left, _TICK) if self.looks else left))}
            if self.control in ready:
                self._end()
                os._exit(0)  # the caller is gone: it sends nothing while a program runs
            for descriptor in ready & self.texts.keys():
                if not self._read(descriptor):
                    poll.unregister(descriptor)
            status = self._overrun() or ("exited" if self.exited in ready else "")
            if not status and self.cells.fileno() in ready and (reply := self._hear(mark)):
                if reply == _CLOSED:
                    poll.unregister(self.cells)
                    continue
                self._drain()
                status = self._overrun() or ("memory" if reply == b"m" else self._greed() if self.looks else "")
                if not status:
                    return "0" if reply == b"0" else "1"
            if self.looks and time.monotonic() > look:
                look = time.monotonic() + _TICK
                self._reap()
                status = status or self._greed()
        self._end()
        self._drain()
        return self._overrun() or status

    def rest(self) -> str:
        """Wait for the next request. The reason if the session ended before it, and nothing of it is left then."""
        over = ""
        while not over:
            ready, _, _ = select.select([self.control, self.exited], [], [], _IDLE if self.looks else None)
            if self.control in ready:
                return ""
            self._reap()
            status = self._greed() if self.looks else ""
            if self.exited in ready and not status:
                code = os.waitstatus_to_exitcode(self.ended or 0)
                status = _status(code, "", self.settings["level"])
                over = f"its process ended between two cells, with exit code {code}"
            if status in ("timeout", "memory"):
                limit = "cpu_seconds" if status == "timeout" else "memory_mb"
                over = f"between two cells its processes exceeded {limit} ({self.settings[limit]})"
        self._end(everything=True)
        return over

    def _pose(self, cell: bytes) -> bytes:
        """Send a cell, in a file, with a mark that its answer begins with."""
        mark, source = os.urandom(16), _sealed(cell)
        with suppress(ConnectionError):  # it has closed its end, and will exit or time out
            socket.send_fds(self.cells, [mark], [source])
        os.close(source)
        return mark

    def _hear(self, mark: bytes) -> bytes:
        """The answer to a cell, if the session's own process has sent one; not its children or its earlier cells."""
        with suppress(BlockingIOError, ConnectionError):
            # No room for descriptors besides the sender.
            message, extra, _, _ = self.cells.recvmsg(64, socket.CMSG_LEN(_SENDER.size))
            if not message:
                return _CLOSED
            sender = _SENDER.unpack(extra[0][2])[0] if extra else None
            if self.speaker is None:
                self.speaker = sender  # its first message is sent before any cell is run
            elif sender == self.speaker and message[:-1] == mark:
                return message[-1:]
        return b""

    def _greed(self) -> str:
        """Status for a limit exceeded by all its processes together, or ""."""
        processes = limits.below(limits.self_pid())
        memory, self.cpu = limits.taken(processes)
        if self.cpu > self.settings["cpu_seconds"]:
            return "timeout"
        most = self.settings["memory_mb"] << 20
        return "memory" if memory > most and limits.shared_out(processes) > most else ""

    def _overrun(self) -> str:
        return "output" if max(len(self.texts[self.out]), len(self.texts[self.error])) > self.most else ""

    def _read(self, descriptor: int) -> bool:
        """Read available bytes, up to one byte beyond the limit. False at the end."""
        try:
            part = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return True
        text = self.texts[descriptor]
        text += part[: self.most + 1 - len(text)]
        return bool(part)

    def _drain(self) -> None:
        for descriptor in self.texts:
            size = -1
            while size != (size := len(self.texts[descriptor])):
                self._read(descriptor)

    def _reap(self) -> bool:
        """Whether children are left."""
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self.pid:
                    self.ended = found[1]
            return True
        return False

    def _end(self, everything: bool = False) -> None:
        """Kill it and wait for it. Also its descendants: they die with this process at the level namespaces, unless
        `everything` is to end now; landlock has none."""
        until = time.monotonic() + _PATIENCE
        strays = self.settings["level"] in ("bubblewrap", "none")
        while True:
            if everything and self.settings["level"] == "namespaces":
                with suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)  # this process is the first of its namespace
            more = self._reap() and everything
            left = {*(limits.below(os.getpid()) if strays else ()), *(() if self.ended is not None else (self.pid,))}
            if not left and not more:
                break
            if time.monotonic() > until:
                raise TimeoutError(f"a program was killed and has not ended within {_PATIENCE:g} s")
            for child in left:
                with suppress(ProcessLookupError):  # it has just exited
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.0005)
        self.pid = 0


def _answer(control: int, running: Running, status: str) -> None:
    seconds = time.monotonic() - running.began
    if not running.begun and status != "timeout":
        texts = (running.texts[descriptor] for descriptor in (running.setup, running.error))
        _send(control, {"failed": b" ".join(texts).decode("utf-8", "replace") or f"{status} before it began"})
        running.pid = 0
        return
    code = os.waitstatus_to_exitcode(running.ended) if running.ended is not None else int(status != "0")
    out, error = (bytes(running.texts[descriptor][: running.most]) for descriptor in (running.out, running.error))
    if status == "exited":
        status = _status(code, error.decode("utf-8", "replace"), running.settings["level"])
        if status == "killed" and _cpu() >= running.settings["cpu_seconds"]:
            status = "timeout"
    elif status in ("0", "1"):
        status = "ok" if status == "0" else "error"
    cpu = max(0.0, _cpu() - running.cpu_before, running.cpu - running.cpu_before)
    header = {"status": status, "exit_code": code, "seconds": seconds, "cpu_seconds": cpu}
    _send(control, header | {"ended": not running.pid, "truncated": status == "output"}, out, error)


def _status(code: int, error: str, level: str) -> str:
    if code == 0:
        return "ok"
    if level == "bubblewrap" and 128 < code <= 128 + signal.SIGRTMAX:
        code = 128 - code  # bwrap reports signals as shells do
    if code == -signal.SIGXCPU:
        return "timeout"
    if code < 0:
        return "killed"
    return "memory" if _NO_MEMORY.match(error.rstrip().rpartition("\n")[2]) else "error"


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _sealed(content: bytes) -> int:
    """A sealed, read-only memory file."""
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0xF)
    return descriptor


def _send(control: int, header: dict[str, Any], *bodies: bytes) -> None:
    view = memoryview(wire.pack(header, *bodies))
    while view:
        view = view[os.write(control, view) :]
