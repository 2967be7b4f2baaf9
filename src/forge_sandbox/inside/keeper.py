"""Keeper: the parent of a program. It reads the request, forks the program, monitors it, replies and exits.

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

from . import confine, limits, namespaces, program, wire
from .syscalls import prctl
from .wire import Header, Settings

_KILL_TIMEOUT = 5.0  # seconds for killed processes to exit
_CHECK_INTERVAL = 0.05  # seconds between checks of memory and CPU time
_IDLE_INTERVAL = 0.25  # the same, between the cells of a session
_SUBREAPER = 36  # option of prctl
_CLOSED = b"closed"
_SENDER = struct.Struct("3i")  # process, user, group
_NO_MEMORY = re.compile(r"^[\w.]*MemoryError\b")


def keep(control: int, settings: Settings) -> None:
    """Serve one request from `control`, or a session; the caller then exits."""
    if settings["level"] == "namespaces":
        namespaces.private_mounts(settings["file_mb"], settings["paths"], settings["links"])
    prctl(_SUBREAPER, 1)  # orphans are reparented to this process
    header, bodies = wire.unpack(lambda size: os.read(control, size))
    if header["kind"] == "run":
        running = Running(control, settings, bodies)
        return _reply(control, running, running.watch(header["time_limit"]))
    running = Running(control, settings, None)
    _send(control, {})
    while running.pid:
        end_reason = running.wait_for_request()
        header, bodies = wire.unpack(lambda size: os.read(control, size))
        if end_reason:
            return _send(control, {"over": end_reason})
        running.clear()
        _reply(control, running, running.watch(header["time_limit"], bodies[0]))


class Running:
    """A running program with its output, or a session if `bodies` is None.

    Attributes:
        pid: 0 after its end.
        begun: confinement succeeded.
    """

    def __init__(self, control: int, settings: Settings, bodies: list[bytes] | None) -> None:
        self.control = control
        self.settings = settings
        self.max_output = settings["output_kb"] << 10
        out, error, setup = (os.pipe() for _ in range(3))
        # The kernel adds the sender's process to each reply. A socket, unlike a pipe, cannot be opened a second time
        # through /proc, so that only this process writes cells.
        self.cells, cells = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.cells.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.cells.setblocking(False)
        self.session_pid: int | None = None  # as the kernel names it
        source, stdin = bodies or (b"", b"")
        self.began = time.monotonic()
        self.pid = os.fork()
        if not self.pid:
            try:
                for descriptor, number in ((_sealed_file(stdin), 0), (out[1], 1), (error[1], 2)):
                    os.dup2(descriptor, number)

                def run() -> None:
                    if bodies:
                        program.run_program(source.decode("utf-8", "surrogatepass"))
                    else:
                        program.run_cells(cells.fileno())

                confine.confine(settings, () if bodies else (cells.fileno(),), run, setup[1])
            finally:
                os._exit(confine.SETUP_FAILED)
        cells.close()
        for descriptor in (out[1], error[1], setup[1]):
            os.close(descriptor)
        self.out = out[0]
        self.error = error[0]
        self.setup = setup[0]
        for descriptor in (self.out, self.error, self.setup):
            os.set_blocking(descriptor, False)
        self.exited = os.pidfd_open(self.pid)
        self.texts = {self.out: bytearray(), self.error: bytearray(), self.setup: bytearray()}
        self.ended: int | None = None
        self.cpu = self.cpu_before = 0.0  # of all its processes, when last measured

    @property
    def begun(self) -> bool:
        """Whether the confinement is complete and the program has started."""
        return bytes(self.texts[self.setup]) == confine.BEGUN

    def clear(self) -> None:
        """Clear output and times, before the next cell of a session."""
        self.began = time.monotonic()
        self.cpu_before = max(_cpu(), self.cpu)
        self.texts[self.out] = bytearray()
        self.texts[self.error] = bytearray()

    def watch(self, limit: float, cell: bytes | None = None) -> str:
        """Wait until it has exited ("exited"), replied to a cell ("0", "1"), or was killed for exceeding a limit."""
        deadline = self.began + limit
        poll = select.poll()
        for descriptor in (self.control, self.exited, *self.texts, *(() if cell is None else (self.cells,))):
            poll.register(descriptor, select.POLLIN)
        mark = b"" if cell is None else self._send_cell(cell)
        status = ""
        next_check = self.began + _CHECK_INTERVAL
        while not status:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                status = "timeout"
                break
            # Limits that the kernel does not enforce for a whole tree of processes are looked at now and then.
            ready = {descriptor for descriptor, _ in poll.poll(1000 * min(remaining, _CHECK_INTERVAL))}
            if self.control in ready:
                self._kill()
                os._exit(0)  # the caller has ended: it sends nothing while a program runs
            for descriptor in ready & self.texts.keys():
                if not self._read(descriptor):
                    poll.unregister(descriptor)
            status = self._check_output() or ("exited" if self.exited in ready else "")
            if not status and self.cells.fileno() in ready and (reply := self._receive_reply(mark)):
                if reply == _CLOSED:
                    poll.unregister(self.cells)
                    continue
                # What the cell wrote before its reply may still be in the pipes.
                self._drain()
                status = self._check_output() or ("memory" if reply == b"m" else self._check_usage())
                if not status:
                    return "0" if reply == b"0" else "1"
            if time.monotonic() > next_check:
                next_check = time.monotonic() + _CHECK_INTERVAL
                self._reap()
                status = status or self._check_usage()
        self._kill()
        self._drain()
        return self._check_output() or status

    def wait_for_request(self) -> str:
        """Wait for the next request. Returns the reason if the session ended before it; all its processes have then
        ended."""
        reason = ""
        while not reason:
            # Processes that a cell has left running still use memory and time.
            ready, _, _ = select.select([self.control, self.exited], [], [], _IDLE_INTERVAL)
            if self.control in ready:
                return ""
            self._reap()
            status = self._check_usage()
            if self.exited in ready and not status:
                code = os.waitstatus_to_exitcode(self.ended or 0)
                status = _status(code, "")
                reason = f"its process ended between two cells, with exit code {code}"
            if status in ("timeout", "memory"):
                limit = "cpu_seconds" if status == "timeout" else "memory_mb"
                reason = f"between two cells its processes exceeded {limit} ({self.settings[limit]})"
        self._kill(everything=True)
        return reason

    def _send_cell(self, cell: bytes) -> bytes:
        """Send a cell, in a file, with a mark that its reply must begin with."""
        mark = os.urandom(16)
        source = _sealed_file(cell)
        with suppress(ConnectionError):  # it has closed its end, and will exit or time out
            socket.send_fds(self.cells, [mark], [source])
        os.close(source)
        return mark

    def _receive_reply(self, mark: bytes) -> bytes:
        """Return the reply to a cell, if the session's process has sent one; replies of its children and of earlier
        cells do not count."""
        with suppress(BlockingIOError, ConnectionError):
            # No room for descriptors besides the sender.
            message, extra, _, _ = self.cells.recvmsg(64, socket.CMSG_LEN(_SENDER.size))
            if not message:
                return _CLOSED
            sender = _SENDER.unpack(extra[0][2])[0] if extra else None
            if self.session_pid is None:
                self.session_pid = sender  # its first message is sent before any cell is run
            elif sender == self.session_pid and message[:-1] == mark:
                return message[-1:]
        return b""

    def _check_usage(self) -> str:
        """Return the status for a limit that all its processes together exceed, or ""."""
        processes = limits.descendants(limits.self_pid())
        memory, self.cpu = limits.usage(processes)
        if self.cpu > self.settings["cpu_seconds"]:
            return "timeout"
        max_memory = self.settings["memory_mb"] << 20
        # The exact measure is slow, and only needed when the sum with shared pages is too large.
        return "memory" if memory > max_memory and limits.proportional_memory(processes) > max_memory else ""

    def _check_output(self) -> str:
        size = max(len(self.texts[self.out]), len(self.texts[self.error]))
        return "output" if size > self.max_output else ""

    def _read(self, descriptor: int) -> bool:
        """Read available bytes, up to one byte beyond the limit. False at the end."""
        try:
            part = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return True
        text = self.texts[descriptor]
        text += part[: self.max_output + 1 - len(text)]
        return bool(part)

    def _drain(self) -> None:
        for descriptor in self.texts:
            size = -1
            while size != len(self.texts[descriptor]):
                size = len(self.texts[descriptor])
                self._read(descriptor)

    def _reap(self) -> bool:
        """Collect children that have exited; return whether others remain."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return True
                if pid == self.pid:
                    self.ended = status
        return False

    def _kill(self, everything: bool = False) -> None:
        """Kill the program and wait for it. Also its descendants: they die with this process at the level namespaces,
        unless `everything` should end now."""
        deadline = time.monotonic() + _KILL_TIMEOUT
        strays = self.settings["level"] == "none"
        while True:
            if everything and self.settings["level"] == "namespaces":
                with suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)  # this process is the first of its namespace
            children_remain = self._reap() and everything
            descendants = limits.descendants(os.getpid()) if strays else ()
            victims = {*descendants, *(() if self.ended is not None else (self.pid,))}
            if not victims and not children_remain:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"a program was killed and has not ended within {_KILL_TIMEOUT:g} s")
            for child in victims:
                with suppress(ProcessLookupError):  # it has just exited
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.0005)
        self.pid = 0


def _reply(control: int, running: Running, status: str) -> None:
    # A program that never began is a fault of the sandbox, not of the program.
    seconds = time.monotonic() - running.began
    if not running.begun and status != "timeout":
        texts = (running.texts[descriptor] for descriptor in (running.setup, running.error))
        _send(control, {"failed": b" ".join(texts).decode("utf-8", "replace") or f"{status} before it began"})
        running.pid = 0
        return
    code = os.waitstatus_to_exitcode(running.ended) if running.ended is not None else int(status != "0")
    out, error = (bytes(running.texts[descriptor][: running.max_output]) for descriptor in (running.out, running.error))
    if status == "exited":
        status = _status(code, error.decode("utf-8", "replace"))
        # The kernel kills at the limit of CPU time, which then looks like any other kill.
        if status == "killed" and _cpu() >= running.settings["cpu_seconds"]:
            status = "timeout"
    elif status in ("0", "1"):
        status = "ok" if status == "0" else "error"
    cpu = max(0.0, _cpu() - running.cpu_before, running.cpu - running.cpu_before)
    header = {"status": status, "exit_code": code, "seconds": seconds, "cpu_seconds": cpu}
    _send(control, header | {"ended": not running.pid, "truncated": status == "output"}, out, error)


def _status(code: int, error: str) -> str:
    if code == 0:
        return "ok"
    if code == -signal.SIGXCPU:
        return "timeout"
    if code < 0:
        return "killed"
    return "memory" if _NO_MEMORY.match(error.rstrip().rpartition("\n")[2]) else "error"


def _cpu() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def _sealed_file(content: bytes) -> int:
    """Create a sealed, read-only memory file."""
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0xF)
    return descriptor


def _send(control: int, header: Header, *bodies: bytes) -> None:
    view = memoryview(wire.pack(header, *bodies))
    while view:
        view = view[os.write(control, view) :]
