"""A sandbox for untrusted Python programs."""

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
    """Result of a program: its status, exit code and output.

    status: one of
        - "ok": its exit code is 0;
        - "error": it has another exit code, or raised an exception;
        - "timeout": it reached the limit of wall-clock or CPU time;
        - "memory": it did not catch a MemoryError, or its processes together exceeded the limit;
        - "output": its stdout or stderr exceeded the limit, and was cut;
        - "killed": a signal ended it, as in a crash.
    stdout, stderr: what it has printed, in which invalid UTF-8 is replaced.
    seconds, cpu_seconds: the wall-clock and CPU time that it took.
    exit_code: the negative number of the signal that ended it, if one did.
    truncated: whether stdout or stderr was cut.
    """

    status: str
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    exit_code: int = 0
    truncated: bool = False


class _Pending:
    """Link between a submitted program and the worker that runs it, for cancellation from another thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._cancelled = False
        self._worker: Worker | None = None

    def assign(self, worker: Worker | None) -> bool:
        """Set the worker that will run the program, None once it has; return False if the program was cancelled."""
        with self._lock:
            self._worker = worker
            return not self._cancelled

    def cancel(self) -> None:
        """Cancel the program, and interrupt its worker if it has one."""
        with self._lock:
            self._cancelled = True
            if self._worker is not None:
                self._worker.interrupt()


class Sandbox:
    """Sandbox for untrusted programs, each run in a process forked from one with all imports; see docs/sandbox.md.

    It is started by the first program, `start` or `async with`, and may be used in several event loops.

    Args:
        level: "namespaces" isolates programs; "none" isolates nothing, and requires `allow_unsafe`; "auto" is
            "namespaces", or "none" where namespaces are not permitted and `allow_unsafe` is set.
        workers: the number of programs that run at once.
        memory_mb: the limit for the address space of each process, and for the memory of all of a program's processes.
        cpu_seconds: the limit for each process, and for a program's processes together.
        processes: the number of processes and threads that a program may have.
        file_mb: the limit for all files of a program in /tmp together.
        output_kb: the limit for each of stdout and stderr.
        imports: modules that are imported once for all programs. Add their folders to `path`, unless they are in the
            standard library.
        path: folders from which programs can import.
        readable: further files and folders that programs can read.
        python: the interpreter; None: the running one.
        user: the id of the user that the processes run as, which requires root; None: this process's user.
        allow_unsafe: allow level "none".

    Raises:
        ValueError: a setting is invalid.
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
        limits = {
            **{"workers": workers, "memory_mb": memory_mb, "cpu_seconds": cpu_seconds, "processes": processes},
            **{"file_mb": file_mb, "output_kb": output_kb},
        }
        invalid = [name for name, value in limits.items() if not isinstance(value, int) or value < 1]
        # Paths inside /tmp are possible, but not /tmp itself nor a folder that contains it.
        real_paths = {name: os.path.realpath(name) for name in (*path, *readable)}
        hidden = [name for name, real in real_paths.items() if os.path.commonpath([real, "/tmp"]) == real]
        for is_right, problem in (
            (level in ("auto", *LEVELS), f"level must be auto, {', '.join(LEVELS)}, not {level!r}"),
            (level != "none" or allow_unsafe, "level none isolates nothing: set allow_unsafe to accept that"),
            (not invalid, f"{', '.join(invalid)} must be at least 1, and whole numbers"),
            (not hidden, f"{', '.join(hidden)}: programs have their own /tmp, name single paths in it"),
        ):
            if not is_right:
                raise ValueError(problem)

        self.level = level
        self._is_unsafe = allow_unsafe
        self._settings: Settings = limits | {
            "limits": _LIMITS | {"AS": memory_mb << 20, "FSIZE": file_mb << 20, "CPU": cpu_seconds},
            "folder": "/tmp",
            "imports": list(imports),
            "path": [real_paths[folder] for folder in path],
            "readable": [os.path.abspath(folder) for folder in (*path, *readable)],
        }

        self._python = python or os.path.realpath(sys.executable)
        self._user = user
        self._threads = ThreadPoolExecutor(workers, "sandbox")
        # One entry for each thread; None: the worker is not started yet.
        self._idle: SimpleQueue[Worker | None] = SimpleQueue()
        for _ in range(workers):
            self._idle.put(None)
        self._lock = Lock()
        self._started = self._closed = False

        self._workers: set[Worker] = set()

    async def __aenter__(self) -> "Sandbox":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Select the isolation level by running a test program; no effect if it is selected already.

        Raises:
            SandboxError: no level that the settings allow works on this machine; the message has the reason.
        """
        self._check_usable()
        await asyncio.wrap_future(self._threads.submit(self._start))

    async def run(self, program: str, stdin: str = "", time_limit: float = 5.0) -> Result:
        """Run a Python program, and return its result. If this call is cancelled, the program is killed.

        Args:
            program: its source.
            stdin: its input.
            time_limit: the wall-clock seconds that it may take.

        Raises:
            ValueError: the program or its input is too long or cannot be encoded as UTF-8, or the time limit is
                invalid.
            SandboxError: the sandbox failed, and failed again on a retry with a new process.
            RuntimeError: the sandbox is closed.
        """
        if not 0 < time_limit <= 86_400:
            raise ValueError(f"time_limit must be above 0 and at most 86400 seconds, got {time_limit}")
        try:
            bodies = [text.encode() for text in (program, stdin)]
        except UnicodeEncodeError as error:
            raise ValueError(f"a program and its input must be encodable as UTF-8: {error}") from None
        if sum(map(len, bodies)) > MAX_BYTES:
            raise ValueError(
                f"a program with its input must have at most {MAX_BYTES} bytes, got {sum(map(len, bodies))}"
            )
        self._check_usable()
        pending = _Pending()
        future = self._threads.submit(self._run_program, bodies, time_limit, pending)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            pending.cancel()
            raise

    async def close(self) -> None:
        """Kill all programs. The sandbox cannot be used again; a second call has no effect."""
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
        # Select the level, once; called in a thread of the sandbox.
        with self._lock:
            if self._started:
                return
            self.level = select_level(self.level, self._is_unsafe, self._settings, self._python, self._user)
            self._settings["level"] = self.level
            self._started = True
        log.log(logging.WARNING if self.level == "none" else logging.INFO, "programs run at level %s", self.level)

    def _run_program(self, bodies: list[bytes], time_limit: float, pending: _Pending) -> Result:
        # Run a program in an idle worker, and return its result; called in a thread of the sandbox.
        self._start()
        worker = self._idle.get()
        try:
            # A worker that fails is replaced once, since the program need not be the cause.
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
            if worker is not None and worker.interrupted:
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
    """Return the result of a program from the reply of its worker.

    Args:
        bodies: stdout and stderr.
        cpu_seconds: the limit of CPU time.
    """
    stdout, stderr = (body.decode("utf-8", "replace") for body in bodies)
    status, code = header["status"], header["exit_code"]
    if status == "exited":
        # At the limit of CPU time the kernel sends SIGXCPU, and SIGKILL a second later, which may have other causes.
        is_cpu_timeout = code == -signal.SIGXCPU or (code < 0 and header["cpu_seconds"] >= cpu_seconds)
        last_line = stderr.rstrip().rpartition("\n")[2]
        if is_cpu_timeout:
            status = "timeout"
        elif code <= 0:
            status = "killed" if code else "ok"
        else:
            status = "memory" if _NO_MEMORY.match(last_line) else "error"
    return Result(status, stdout, stderr, header["seconds"], header["cpu_seconds"], code, status == "output")


# The canary, a program that tries what the level must prevent, and prints the names of what it could do and of the
# environment variables that it has inherited.
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
    """Return the isolation level at which programs run, "namespaces" or "none".

    Args:
        level: the setting; for "auto", "namespaces" is tried first, and "none" is the alternative.
        is_unsafe: whether "none" is allowed.
        settings, python, user: as for `Worker`.

    Raises:
        SandboxError: namespaces do not isolate programs on this machine, and "none" is not allowed, or nothing can be
            run at all; the message has the reason.
    """
    try:
        tried = "none" if level == "none" else "namespaces"
        escapes = _try_level(settings | {"level": tried}, python, user)
        # The level "none" prevents nothing: it is only tried to see that programs run.
        if not escapes or tried == "none":
            return tried
        reason = f"a program was not prevented from: {escapes}"
    except SandboxError as error:
        reason = str(error)

    if level == "auto" and is_unsafe:
        return "none"
    raise SandboxError(
        f"programs cannot be isolated here. {tried}: {reason}. Allow user namespaces (docs/sandbox.md, Containers), "
        "or set level='none' and allow_unsafe=True to run programs with all your rights"
    )


def _try_level(settings: Settings, python: str, user: int | None) -> str:
    """Run the canary, and return the names of what it could do and should not: "" at a level that isolates programs.

    It tries to read a file, to write next to it, to open a socket, to signal its parent, and to exceed its memory.

    Raises:
        SandboxError: the canary could not run.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        file = os.path.join(folder, "file")
        with open(file, "w"):
            os.chmod(file, 0o644)

        # Four times its limit. The canary only allocates the memory, so that level "none" does not fill the machine.
        canary = _CANARY.format(parent=os.getpid(), file=file, memory=(settings["memory_mb"] << 20) * 4)
        worker = Worker(settings, python, user)
        try:
            header, (out, error) = worker.request({"time_limit": 10.0}, canary.encode(), b"", limit=10.0)
        finally:
            worker.kill()

        if header["status"] != "exited" or header["exit_code"]:
            raise SandboxError(f"a program could not run ({header['status']}: {error.decode(errors='replace')[-300:]})")
        return " ".join([*out.decode(errors="replace").split(), *(["write"] if os.path.exists(file + ".new") else [])])
