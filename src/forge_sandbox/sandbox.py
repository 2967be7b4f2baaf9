"""Sandbox for untrusted Python programs."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock

from .worker import Header, SandboxError, Settings, Worker

log = logging.getLogger(f"forge.{__name__}")

MAX_BYTES = 64 << 20  # of a program and its input
_LIMITS = {"NOFILE": 64, "CORE": 0, "MEMLOCK": 0, "MSGQUEUE": 0, "SIGPENDING": 64}  # of a process
LEVELS = ("namespaces", "none")
_NO_MEMORY = re.compile(r"^[\w.]*MemoryError\b")


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of a program.

    `status` is one of

    - "ok": exit code 0;
    - "error": another exit code, or an exception;
    - "timeout": of wall or CPU time;
    - "memory": an uncaught MemoryError, or its processes together exceeded the limit;
    - "output": stdout or stderr exceeded the limit and was cut (`truncated`);
    - "killed": by a signal, as in a crash.

    `exit_code` is the negative signal number for a signal. Invalid UTF-8 is replaced.
    """

    status: str
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    exit_code: int = 0
    truncated: bool = False


class _Pending:
    """A submitted program and the worker that runs it, for its cancellation."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._cancelled = False
        self._worker: Worker | None = None

    def assign(self, worker: Worker | None) -> bool:
        """Set the worker. False if the program was cancelled."""
        with self._lock:
            self._worker = worker
            return not self._cancelled

    def cancel(self) -> None:
        """Cancel the program."""
        with self._lock:
            self._cancelled = True
            if self._worker is not None:
                self._worker.interrupt()


class Sandbox:
    """Runs each program in a process forked from a warm one; see docs/sandbox.md.

    It starts with the first program, `start` or `async with`, and is not bound to an event loop.

    Args:
        level: "namespaces"; "none" isolates nothing and requires `allow_unsafe`; "auto" is namespaces, or none where
            they are not permitted and `allow_unsafe` is set.
        workers: concurrent programs.
        memory_mb: address space of a process, and memory of a program's processes together.
        cpu_seconds: per process, and for a program's processes together.
        processes: of a program, including threads.
        file_mb: total size of files in /tmp.
        output_kb: of each of stdout and stderr.
        imports: modules imported once for all programs; add their folders to `path` unless in the standard library.
        path: folders to import from; readable.
        readable: additional readable files and folders.
        python: the interpreter; by default the running one.
        user: user id of the processes; requires root.
        allow_unsafe: allow level "none".

    Raises:
        ValueError: an invalid setting.
    """

    def __init__(
        self,
        level: str = "auto",
        *,
        workers: int = 2,
        memory_mb: int = 512,
        cpu_seconds: int = 10,
        processes: int = 8,
        file_mb: int = 16,
        output_kb: int = 64,
        imports: Sequence[str] = (),
        path: Sequence[str] = (),
        readable: Sequence[str] = (),
        python: str | None = None,
        user: int | None = None,
        allow_unsafe: bool = False,
    ) -> None:
        if level not in ("auto", *LEVELS):
            raise ValueError(f"level must be auto, {', '.join(LEVELS)}, not {level!r}")
        if level == "none" and not allow_unsafe:
            raise ValueError("level none isolates nothing: set allow_unsafe to accept that")
        limits = {"workers": workers, "memory_mb": memory_mb, "cpu_seconds": cpu_seconds, "processes": processes}
        limits |= {"file_mb": file_mb, "output_kb": output_kb}
        invalid = [name for name, value in limits.items() if not isinstance(value, int) or value < 1]
        if invalid:
            raise ValueError(f"{', '.join(invalid)} must be at least 1, and whole numbers")

        paths = {given: os.path.realpath(given) for given in (*path, *readable)}
        hidden = [given for given, real in paths.items() if os.path.commonpath([real, "/tmp"]) == real]
        if hidden:
            raise ValueError(f"{', '.join(hidden)}: programs have their own /tmp, name single paths in it")
        self.level = level
        self._is_unsafe = allow_unsafe
        self._settings: Settings = limits | {
            "limits": _LIMITS | {"AS": memory_mb << 20, "FSIZE": file_mb << 20, "CPU": cpu_seconds},
            "folder": "/tmp",
            "imports": list(imports),
            "path": [paths[folder] for folder in path],
            "readable": [os.path.abspath(folder) for folder in (*path, *readable)],
        }

        self._python = python or os.path.realpath(sys.executable)
        self._user = user
        self._threads = ThreadPoolExecutor(workers, "sandbox")
        self._idle: SimpleQueue[Worker | None] = SimpleQueue()  # one for each thread
        for _ in range(workers):
            self._idle.put(None)
        self._lock = Lock()
        self._started = self._closed = False

        self._workers: set[Worker] = set()

    async def __aenter__(self) -> Sandbox:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Select the level. SandboxError: none works here, with the reasons."""
        self._check_usable()
        await asyncio.wrap_future(self._threads.submit(self._start))

    async def run(self, program: str, stdin: str = "", time_limit: float = 5.0) -> Result:
        """Run a program; cancelling the call kills it.

        Args:
            time_limit: wall-clock seconds.

        Raises:
            ValueError: too long, not encodable as UTF-8, or an invalid time limit.
            SandboxError: the sandbox failed, also on a retry with a new process.
            RuntimeError: closed.
        """
        bodies = _encode_request(time_limit, program, stdin)
        self._check_usable()
        pending = _Pending()
        future = self._threads.submit(self._run_program, bodies, time_limit, pending)
        try:
            # The thread waits for the worker, and returns soon after the worker was killed.
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            pending.cancel()
            raise

    async def close(self) -> None:
        """Kill all programs and close for good; idempotent."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.interrupt()
        for worker in workers:
            await asyncio.to_thread(self._discard_worker, worker)
        self._threads.shutdown(wait=False)

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError("the sandbox is closed")

    def _start(self) -> None:
        with self._lock:
            if self._started:
                return
            self.level = select_level(self.level, self._is_unsafe, self._settings, self._python, self._user)
            self._settings["level"] = self.level
            self._started = True
        log.log(logging.WARNING if self.level == "none" else logging.INFO, "programs run at level %s", self.level)

    def _run_program(self, bodies: list[bytes], time_limit: float, pending: _Pending) -> Result:
        self._start()
        worker = self._idle.get()
        try:
            # A worker that fails is replaced once: the program may have brought it down, or the machine.
            for is_last in (False, True):
                try:
                    worker = worker or self._start_worker()
                    if not pending.assign(worker):
                        break
                    reply = worker.request({"time_limit": time_limit}, *bodies, limit=time_limit)
                    worker.settle()
                    return _make_result(*reply, self._settings["cpu_seconds"])
                except SandboxError:
                    if is_last or (worker is not None and worker.interrupted):
                        raise
                    if worker is not None:
                        self._discard_worker(worker)
                    worker = None

            raise SandboxError("the program was cancelled")
        finally:
            pending.assign(None)
            if worker is not None and worker.interrupted:  # no longer usable
                self._discard_worker(worker)
                worker = None
            self._idle.put(worker)

    def _start_worker(self) -> Worker:
        worker = Worker(self._settings, self._python, self._user)
        with self._lock:
            if not self._closed:
                self._workers.add(worker)
                return worker
        worker.kill()
        raise SandboxError("the sandbox was closed")

    def _discard_worker(self, worker: Worker) -> None:
        self._workers.discard(worker)
        worker.kill()


def _make_result(header: Header, bodies: list[bytes], cpu_seconds: int) -> Result:
    out, error = (body.decode("utf-8", "replace") for body in bodies)
    status, code = header["status"], header["exit_code"]
    if status == "exited" and code <= 0:
        # The kernel kills at the limit of CPU time, which then looks like any other kill.
        is_timeout = code == -signal.SIGXCPU or (code and header["cpu_seconds"] >= cpu_seconds)
        status = "timeout" if is_timeout else "killed" if code else "ok"
    elif status == "exited":
        status = "memory" if _NO_MEMORY.match(error.rstrip().rpartition("\n")[2]) else "error"
    return Result(status, out, error, header["seconds"], header["cpu_seconds"], code, status == "output")


def _encode_request(time_limit: float, *texts: str) -> list[bytes]:
    if not 0 < time_limit <= 86_400:
        raise ValueError(f"time_limit must be above 0 and at most 86400 seconds, got {time_limit}")
    try:
        bodies = [text.encode() for text in texts]
    except UnicodeEncodeError as error:
        raise ValueError(f"a program and its input must be encodable as UTF-8: {error}") from None
    if sum(map(len, bodies)) > MAX_BYTES:
        raise ValueError(f"a program with its input may have {MAX_BYTES} bytes, got {sum(map(len, bodies))}")
    return bodies


# What the level must prevent a program from.
_CANARY = """
import colorsys, os, socket, sys
def works(what):
    try:
        what()
    except (OSError, MemoryError):
        return False
    return True
own, parent = os.getpid(), {parent}
tried = dict(
    file=lambda: open({file!r}).read(),
    network=lambda: socket.socket(),
    signal=lambda: os.kill(parent, 0) if own > 2 or parent > 2 else None,
    memory=lambda: bytearray({memory}),
)
works(lambda: open({file!r} + ".new", "w"))
print(*(name for name, what in tried.items() if works(what)), *(sorted({{*os.environ}} - {{"HOME", "LANG", "PATH"}})))
"""


def select_level(level: str, is_unsafe: bool, settings: Settings, python: str, user: int | None) -> str:
    """Return the level at which programs run: "auto" is namespaces, or none where these do not confine the canary and
    `is_unsafe` accepts that. SandboxError: they do not, with the reason."""
    try:
        tried = "none" if level == "none" else "namespaces"
        escapes = _try_level(settings | {"level": tried}, python, user)
        # Without isolation they are as they should be.
        if not escapes or tried == "none":
            return tried
        reason = f"a program was not prevented from: {escapes}"
    except SandboxError as error:
        reason = str(error)

    if level == "auto" and is_unsafe:
        return "none"
    raise SandboxError(
        f"programs cannot be isolated here. {tried}: {reason}. Allow user namespaces (docs/sandbox.md, Containers), "
        "or run programs with all your rights by level='none' and allow_unsafe=True"
    )


def _try_level(settings: Settings, python: str, user: int | None) -> str:
    """Run the canary, which tries what a program must not do: read this file, write alongside it, use memory, see its
    parent. Return what it could, in words. SandboxError: it could not run."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        file = os.path.join(folder, "file")
        with open(file, "w"):
            os.chmod(file, 0o644)

        # Far beyond its limit; it is not written to, so that the level "none" does not fill the machine.
        memory = (settings["memory_mb"] << 20) * 4
        canary = _CANARY.format(parent=os.getpid(), file=file, memory=memory)
        worker = Worker(settings, python, user)
        try:
            header, (out, error) = worker.request({"time_limit": 10.0}, canary.encode(), b"", limit=10.0)
        finally:
            worker.kill()

        if header["status"] != "exited" or header["exit_code"]:
            raise SandboxError(f"a program could not run ({header['status']}: {error.decode(errors='replace')[-300:]})")
        return " ".join([*out.decode(errors="replace").split(), *(["write"] if os.path.exists(file + ".new") else [])])
