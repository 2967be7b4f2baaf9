"""A sandbox for Python programs that nobody trusts."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock
from typing import Any, TypeVar

from .probe import AUTO, LEVELS, holding
from .worker import SandboxError, Worker

A = TypeVar("A")
log = logging.getLogger(__name__)

_LONGEST = 64 << 20  # bytes of a program with its input


@dataclass(frozen=True, slots=True)
class Result:
    """How a program ended.

    `status` is one of

    - "ok": it came to its end with exit code 0;
    - "error": another exit code, or an exception;
    - "timeout": of wall or CPU time;
    - "memory": a MemoryError that it did not catch, or more memory than all its processes together may have;
    - "output": more than may be written to stdout or stderr, which are cut off there (`truncated`);
    - "killed": by a signal, as at a crash;
    - "ended": of a session's cell that never ran, as the session was over.

    `exit_code` is minus the number of the signal that ended it, if one did (128 and the number at bubblewrap). What is
    not UTF-8 in the output is replaced.
    """

    status: str
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    exit_code: int = 0
    truncated: bool = False


class _Asked:
    """A program that somebody waits for, and the worker that has it, if one does."""

    def __init__(self) -> None:
        self._lock, self._given_up = Lock(), False
        self._worker: Worker | None = None

    def hold(self, worker: Worker | None) -> bool:
        """Exchange the worker. Whether anybody still waits."""
        with self._lock:
            self._worker = worker
            return not self._given_up

    def give_up(self) -> None:
        """Nobody waits any more."""
        with self._lock:
            self._given_up = True
            if self._worker is not None:
                self._worker.interrupt()


class Sandbox:
    """Runs programs, each in a process of its own that is forked from one kept for that; see docs/sandbox.md.

    It starts with the first program, or with `start` or `async with`, and belongs to no event loop.

    Args:
        level: "namespaces", "landlock" or "bubblewrap"; "auto" is the first of these that holds here; "none" is none of
            them, and takes `allow_unsafe`.
        workers: programs at once; each session takes one for itself besides.
        memory_mb: of address space for a process, and of memory for all of a program together.
        cpu_seconds: for a process, and for all of a program together.
        processes: of a program, threads among them. At landlock all of them are threads.
        file_mb: of all files that it writes to /tmp. At landlock and bubblewrap it can write none.
        output_kb: of each of stdout and stderr.
        imports: modules that are imported once for all programs. Those that Python does not come with: see `path`.
        path: folders to import from, which programs may read.
        readable: further files and folders that they may read.
        python: the interpreter; by default the one that runs this.
        user: the id of the user whose processes these are, for root alone.
        allow_unsafe: "none" may be the level, also of "auto" where nothing holds.

    Raises:
        ValueError: a setting that cannot be; says which.
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
            raise ValueError("level none holds programs back from nothing: set allow_unsafe if that is what you want")
        limits = {"workers": workers, "memory_mb": memory_mb, "cpu_seconds": cpu_seconds, "processes": processes}
        limits |= {"file_mb": file_mb, "output_kb": output_kb}
        if wrong := [name for name, value in limits.items() if not isinstance(value, int) or value < 1]:
            raise ValueError(f"{', '.join(wrong)} must be at least 1, and whole numbers")
        places = {place: os.path.realpath(place) for place in (*path, *readable)}
        if hidden := [place for place, real in places.items() if os.path.commonpath([real, "/tmp"]) == real]:
            raise ValueError(
                f"{', '.join(hidden)} cannot be readable: programs have a /tmp of their own. Name what is in it"
            )
        self.level = level
        self._levels = (*AUTO, *(("none",) if allow_unsafe else ())) if level == "auto" else (level,)
        self._settings: dict[str, Any] = limits | {
            "imports": list(imports),
            "path": [places[place] for place in path],
            "readable": [os.path.abspath(place) for place in (*path, *readable)],
            "bubblewrap": shutil.which("bwrap"),
        }
        self._python, self._user = python or os.path.realpath(sys.executable), user
        self._threads = ThreadPoolExecutor(workers, "sandbox")
        self._idle: SimpleQueue[Worker | None] = SimpleQueue()  # as many as threads
        for _ in range(workers):
            self._idle.put(None)
        self._lock = Lock()
        self._started = self._closed = False
        self._process = 0  # that it started in
        self._all: set[Worker] = set()

    async def __aenter__(self) -> Sandbox:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Find out which level holds here. SandboxError: none does; says what is missing."""
        self._check_usable()
        await asyncio.wrap_future(self._threads.submit(self._start))

    async def run(self, program: str, stdin: str = "", time_limit: float = 5.0) -> Result:
        """Run a program to its end. Who stops waiting for it ends it.

        Args:
            time_limit: seconds.

        Raises:
            ValueError: it is too long, cannot be written as UTF-8, or has no time.
            SandboxError: the sandbox has failed, and again with a new process.
            RuntimeError: it is closed, or was started in the process that this one was forked from.
        """
        bodies = _checked(time_limit, program, stdin)
        self._check_usable()
        asked = _Asked()
        future = self._threads.submit(self._run, bodies, time_limit, asked)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            asked.give_up()
            raise

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """A process that keeps its names from one `run` to the next, as a notebook does. Limits of memory, CPU time,
        processes and files hold for all of it, those of output for each cell. Raises as `run` does."""
        await self.start()
        thread = ThreadPoolExecutor(1, "sandbox session")
        starting = thread.submit(self._worker)
        try:
            session = Session(thread, await asyncio.wrap_future(starting))
            try:
                await session.begin()
                yield session
            finally:
                session.close()
                # Whoever stops waiting for the end does not stop it.
                await asyncio.shield(asyncio.wrap_future(thread.submit(self._give_up, session.worker)))
        except asyncio.CancelledError:
            thread.submit(lambda: self._give_up(starting.result()))  # it may have been starting
            raise
        finally:
            thread.shutdown(wait=False)

    async def close(self) -> None:
        """End all that runs. It cannot be used again; this may be called twice."""
        if self._process not in (0, os.getpid()):
            return  # what runs is the parent's
        with self._lock:
            self._closed = True
            workers = list(self._all)
        for worker in workers:
            worker.interrupt()
        for worker in workers:
            await asyncio.to_thread(self._give_up, worker)
        self._threads.shutdown(wait=False)

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError("the sandbox is closed")
        self._process = self._process or os.getpid()
        if self._process != os.getpid():
            raise RuntimeError("the sandbox was started in the process that this one was forked from: make one here")

    def _start(self) -> None:
        with self._lock:
            if self._started:
                return
            self.level = holding(self._levels, self._settings, self._python, self._user)
            self._settings["level"] = self.level
            self._started = True
        log.log(logging.WARNING if self.level == "none" else logging.INFO, "programs run at level %s", self.level)

    def _run(self, bodies: list[bytes], time_limit: float, asked: _Asked) -> Result:
        self._start()
        worker = self._idle.get()
        try:
            for last in (False, True):
                try:
                    worker = worker or self._worker()
                    if not asked.hold(worker):
                        return Result("ended")  # for nobody
                    answer = worker.ask({"kind": "run", "time_limit": time_limit}, *bodies, limit=time_limit)
                    worker.settle()
                    return _result(*answer)
                except SandboxError:
                    if worker is not None:
                        interrupted = worker.interrupted
                        self._give_up(worker)
                        worker = None
                        if last or interrupted:
                            raise
                    elif last or self._closed:
                        raise
            raise AssertionError
        finally:
            asked.hold(None)
            if worker is not None and worker.interrupted:  # after its answer: it is of no use to others
                self._give_up(worker)
                worker = None
            self._idle.put(worker)

    def _worker(self) -> Worker:
        worker = Worker(self._settings, self._python, self._user)
        with self._lock:
            if not self._closed:
                self._all.add(worker)
                return worker
        worker.kill()
        raise SandboxError("the sandbox was closed")

    def _give_up(self, worker: Worker) -> None:
        self._all.discard(worker)
        worker.kill()


class Session:
    """Cells that share their names; see `Sandbox.session`."""

    def __init__(self, thread: ThreadPoolExecutor, worker: Worker) -> None:
        self.worker, self._thread = worker, thread
        self._over = ""

    async def begin(self) -> None:
        await self._in_thread(lambda: self.worker.ask({"kind": "session"}, limit=0.0))

    async def run(self, cell: str, time_limit: float = 5.0) -> Result:
        """Run a cell; the value of a last expression is printed. One that ends with anything but "ok" or "error", or
        asks to exit, ends the session; later ones have the status "ended", and why in `stderr`.

        Raises:
            ValueError: as of `Sandbox.run`. SandboxError: the sandbox has failed, and the session is lost.
        """
        body = _checked(time_limit, cell)[0]
        if self._over:
            return Result("ended", stderr=f"the session is over: {self._over}", exit_code=1)
        try:
            header, bodies = await self._in_thread(
                lambda: self.worker.ask({"time_limit": time_limit}, body, limit=time_limit)
            )
        except BaseException as error:
            self._over = f"the sandbox failed ({error})" if isinstance(error, SandboxError) else "a cell was cancelled"
            raise
        result = _result(header, bodies)
        if header["ended"]:
            self._over = f"a cell ended it with {result.status} (exit code {result.exit_code})"
        return result

    def close(self) -> None:
        self._over = self._over or "it was closed"
        self.worker.interrupt()

    async def _in_thread(self, work: Callable[[], A]) -> A:
        try:
            return await asyncio.wrap_future(self._thread.submit(work))
        except asyncio.CancelledError:
            self.worker.interrupt()
            raise


def _result(header: dict[str, Any], bodies: list[bytes]) -> Result:
    out, error = (body.decode("utf-8", "replace") for body in bodies)
    known = {name: header[name] for name in ("status", "seconds", "cpu_seconds", "exit_code", "truncated")}
    return Result(stdout=out, stderr=error, **known)


def _checked(time_limit: float, *texts: str) -> list[bytes]:
    if not 0 < time_limit <= 86_400:
        raise ValueError(f"time_limit must be above 0 and at most 86400 seconds, got {time_limit}")
    try:
        bodies = [text.encode() for text in texts]
    except UnicodeEncodeError as error:
        raise ValueError(f"a program and its input must be text that UTF-8 can write: {error}") from None
    if sum(map(len, bodies)) > _LONGEST:
        raise ValueError(f"a program with its input may have {_LONGEST} bytes, not {sum(map(len, bodies))}")
    return bodies
