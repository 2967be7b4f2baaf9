"""Runs agents that are programs, each confined for one episode, with the gateway as its only network.

docs/agent_gateway.md says what a program can do, and which attacks are not covered.
"""

import asyncio
import logging
import os
import re
import resource
import socket
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

from forge.config import ConfigError
from forge.runtime.controller.types import keep_until_done
from forge.system.scratch import Scratch, remove_tree
from forge_envs.environment import InfrastructureError
from forge_sandbox.worker import SandboxError, Settings, Worker

from .agent import (
    MAX_VARIABLE,
    TASK,
    AgentCommand,
    CommandResult,
    Status,
    agent_environment,
    fill_task_folder,
    fits_variable,
)

log = logging.getLogger(f"forge.{__name__}")

T = TypeVar("T")
INNER_FOLDER = "/task"  # the task folder, as a confined program sees it
CHUNK = 1 << 16  # bytes that are read at once
MAX_CONNECTIONS = 32  # of one program to the gateway at once: further ones wait
MAX_RUNS = 1024  # programs at once, each of which has a thread that waits for it
TAIL = 1 << 16  # bytes of each output that are returned
LIMITS = {"NOFILE": 4096, "FSIZE": 1 << 30, "CORE": 0, "MEMLOCK": 1 << 20, "MSGQUEUE": 0}  # of a process
# Prints "confined" if it runs as an unprivileged user in an empty task folder.
PROBE = ("/bin/sh", "-c", 'test "$(id -u)" = 65534 && test -z "$(ls /task)" && echo confined')
# The files and folders of the system that programs need, where they exist. None of those in /etc has a secret.
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/dev/random", "/dev/full"),
    *(f"/etc/{name}" for name in ("alternatives", "ssl", "ca-certificates", "pki", "passwd", "group", "nsswitch.conf")),
    *(f"/etc/{name}" for name in ("hosts", "host.conf", "resolv.conf", "localtime", "timezone", "os-release")),
    *(f"/etc/{name}" for name in ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "protocols", "services", "terminfo")),
)
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class CommandRunner:
    """Runner of agent programs, up to 1024 concurrently, each in a new task directory.

    Args:
        allow_unsafe: where the system does not permit namespaces, run programs with all rights of this user instead of
            raising an error at `start`. Their environment variables, the end of all their processes, and all limits but
            `processes` stay the same.
        python: the interpreter for the processes that watch programs; None: the running one.
    """

    def __init__(self, *, allow_unsafe: bool = False, python: str | None = None) -> None:
        self.level: Literal["namespaces", "none"] = "namespaces"  # how programs are confined
        self._allow_unsafe = allow_unsafe
        self._python = python or sys.executable
        self._scratch: Scratch | None = None
        self._threads = ThreadPoolExecutor(MAX_RUNS, "forge-agents")
        self._runs: set[asyncio.Task[CommandResult]] = set()
        # Of all programs: each takes two of this process's descriptors, of which the rest of a run needs some.
        self._connections = asyncio.Semaphore(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3)
        self._numbers = count(1)

    async def start(self) -> None:
        """Create the folder for all runs, and check that programs can be confined, by running one.

        Raises:
            InfrastructureError: they cannot, and `allow_unsafe` is not set.
        """
        if self._scratch is not None:
            return
        self._scratch = Scratch("forge-agents-")
        try:
            result = await self.run(AgentCommand(PROBE, timeout=10))
            result.remove()
            if result.stdout == "confined\n":
                return
            reason = result.reason or f"a program was not confined: {result.stderr.strip() or 'it is root'}"
        except OSError as error:
            reason = str(error)

        if not self._allow_unsafe:
            await self.close()
            raise InfrastructureError(
                f"agents cannot be confined on this machine ({reason}): allow user namespaces, or set "
                "allow_unsafe=True to run programs with all your rights (docs/agent_gateway.md)"
            )

        self.level = "none"
        log.warning("agents are not confined (%s): they run with all rights of this user", reason)

    async def run(
        self,
        command: AgentCommand,
        *,
        url: str | None = None,
        key: str = "",
        model: str = "",
        task_text: str = "",
        files: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> CommandResult:
        """Run a program until it ends or a limit ends it. If this call is cancelled, the program is ended.

        Args:
            url: the gateway's address, `http://HOST:PORT` without `/v1`. None: the program has no network, such as a
                test.
            key, model: what the program sends to the gateway as its API key and as the model's name.
            task_text: the text of the task.
            files: texts that are written into the task folder, by their paths in it.
            folder: the task folder of an earlier result, in which the program runs. None: a new folder, with the
                command's `files`.

        Raises:
            ValueError: the address, or a path in `files`, is invalid.
            RuntimeError: the runner is not started, or is closed.
        """
        if self._scratch is None:
            raise RuntimeError("the command runner is not started: await runner.start() first")
        gateway = None
        if url is not None:
            parts = urlsplit(url)
            if parts.scheme != "http" or not parts.hostname or url.endswith("/v1"):
                raise ValueError(f"url must be http://HOST:PORT of the gateway without /v1, got {url!r}")
            # A program that shares the machine's network connects by itself.
            if command.network == "gateway" and self.level == "namespaces":
                gateway = parts.hostname, parts.port or 80
        is_new = folder is None
        if folder is None:
            folder = self._scratch.path / str(next(self._numbers)) / "task"

        # What the placeholders of the command stand for. A confined program reaches the gateway, on any host, at the
        # same port of its loopback, from which connections are forwarded.
        values = {"url": url or "", "key": key, "model": model, "task": task_text}
        values["folder"] = INNER_FOLDER if self.level == "namespaces" else str(folder)
        if gateway is not None:
            values["url"] = f"http://127.0.0.1:{gateway[1]}{urlsplit(values['url']).path}"

        # The network "gateway" without a port to forward gives no access to any network.
        settings, request = self._sandbox_settings(command, values, folder)
        settings |= {
            "network": "gateway" if url is None else command.network,
            "port": None if gateway is None else gateway[1],
        }

        source = command.files if is_new else None
        texts = {**(files or {}), **({} if fits_variable(task_text) else {TASK: task_text})}
        fill_folder = partial(
            fill_task_folder,
            folder,
            source,
            texts,
            new=is_new,
            owned=self.level == "namespaces" and os.geteuid() == 0,
        )

        async def play_and_clean() -> CommandResult:
            try:
                return await self._play_program(fill_folder, settings, request, folder, gateway)
            except BaseException:
                if is_new:
                    await self._in_thread(partial(remove_tree, folder.parent))
                raise

        # A task, not only a coroutine: `close` cancels it, and waits for its end.
        return await keep_until_done(self._runs, asyncio.create_task(play_and_clean()))

    async def close(self) -> None:
        """End all runs, and remove all task folders."""
        for run in [*self._runs]:
            run.cancel()
        await asyncio.gather(*self._runs, return_exceptions=True)
        if self._scratch is not None:
            await self._in_thread(self._scratch.close)
            self._scratch = None
            self._threads.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _play_program(
        self,
        fill_folder: Callable[[], None],
        settings: Settings,
        request: dict[str, Any],
        folder: Path,
        gateway: tuple[str, int] | None,
    ) -> CommandResult:
        """Fill the folder, run the program in it, and wait until all its processes have ended."""
        await self._in_thread(fill_folder)
        forwarder: Forwarder | None = None
        workers: list[Worker] = []
        seconds: float = request["time_limit"]

        try:
            await self._in_thread(lambda: workers.append(Worker(settings, self._python, None)))
            (worker,) = workers
            if gateway is not None:
                forwarder = Forwarder(socket.socket(fileno=worker.descriptors[0]), *gateway, self._connections)
            ask = partial(worker.request, request, b"", b"", limit=seconds)
            header, outputs = await self._in_thread(ask, worker.interrupt)
        except SandboxError as error:
            return CommandResult("failed", -1, "", "", 0.0, folder, str(error))
        finally:
            if forwarder is not None:
                await forwarder.close()
            for worker in workers:
                await self._in_thread(worker.kill)

        # The sandbox's status, with the result's status and its reason. A program that just exited has none.
        status, code = header["status"], header["exit_code"]
        reasons: dict[str, tuple[Status, str]] = {
            "timeout": ("timeout", f"it ran for {seconds:g} s"),
            "memory": ("memory", f"its processes used over {settings['memory_mb']} MB"),
            "output": ("killed", f"its output exceeded output_kb ({settings['output_kb']})"),
        }
        if header["missing"]:
            reason = (
                f"{request['command'][0]} cannot be executed ({header['missing']}): a program that is not of the "
                "system must be in a folder of `readable`, or in its `bin`"
            )
            reasons["exited"] = "missing", reason
        elif code == -9:
            reasons["exited"] = "killed", "SIGKILL, which neither this library nor a limit of it sent"

        stdout, stderr = (output[-TAIL:].decode(errors="replace") for output in outputs)
        result_status, reason = reasons.get(status, ("exited", ""))
        return CommandResult(result_status, code, stdout, stderr, header["seconds"], folder, reason)

    async def _in_thread(self, work: Callable[[], T], interrupt: Callable[[], None] = lambda: None) -> T:
        """Run a blocking function in a thread, and return its result.

        If this call is cancelled, `interrupt` is called, and the end of the function is awaited.
        """
        running_work = asyncio.wrap_future(self._threads.submit(work))
        try:
            return await asyncio.shield(running_work)
        except asyncio.CancelledError:
            interrupt()
            await asyncio.wait([running_work])
            running_work.exception()  # retrieved, as asyncio would print it
            raise

    def _sandbox_settings(
        self, command: AgentCommand, values: Mapping[str, str], folder: Path
    ) -> tuple[Settings, dict[str, Any]]:
        """Return the settings of the sandbox's process, and the request that it gets, with all placeholders replaced.

        Args:
            values: what the placeholders stand for, by their names.
            folder: the task folder.

        Raises:
            ValueError: a readable folder contains the task folders of all runs.
            ConfigError: an argument or variable becomes too long by the text of the task.
        """
        for path in command.readable:
            if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(path)):
                raise ValueError(
                    f"readable has {path}, which contains the task directories of all runs: list only the paths that "
                    "the program needs"
                )
        pattern = re.compile(rf"\{{({'|'.join(values)})\}}")

        def fill_placeholders(text: str) -> str:
            # In one pass, so that a {key} in the text of the task is not replaced.
            return pattern.sub(lambda match: values[match[1]], text)

        env = {
            **agent_environment(values, program_path(command)),
            **{name: fill_placeholders(text) for name, text in command.env.items()},
        }
        arguments = [fill_placeholders(argument) for argument in command.command]
        for text in (*arguments, *env.values()):
            if not fits_variable(text):
                raise ConfigError(
                    f"episode.agent: {text[:60]!r} is longer than {MAX_VARIABLE:,} bytes or has a NUL: give a "
                    "long task as a file (`texts`) instead of {task}, or read it from $FORGE_TASK_FILE"
                )
        settings = {
            "level": self.level,
            "folder": values["folder"],
            "writable": {INNER_FOLDER: str(folder), "/tmp": str(folder.parent / "tmp")},
            "readable": [*filter(os.path.exists, SYSTEM), *_readable_paths(command)],
            "limits": LIMITS,
            "memory_mb": command.memory_mb,
            "cpu_seconds": float("inf"),
            "processes": command.processes,
            "output_kb": command.output_kb,
        }

        return settings, {"command": arguments, "env": env, "time_limit": command.timeout}


def _readable_paths(command: AgentCommand) -> list[str]:
    """Return the paths that a program may read in addition to the system's: its command's paths, and this Python's."""
    prefixes = [path for path in (sys.prefix, sys.base_prefix) if os.access(path, os.R_OK | os.X_OK)]
    return [os.path.abspath(path) for path in (*command.readable, *prefixes)]


def program_path(command: AgentCommand) -> str:
    """Return the PATH of a command's program: the `bin` of each folder that it may read, then the system's folders."""
    bins = [f"{path}/bin" for path in _readable_paths(command) if os.path.isdir(f"{path}/bin")]
    return ":".join([*bins, SYSTEM_PATH])


class Forwarder:
    """Forwarder of connections from a listening socket to `host` and `port`.

    Connections beyond `MAX_CONNECTIONS` or `room` wait in the kernel, and take no descriptors of this process.

    Args:
        listener: the socket.
        room: the connections that all forwarders may have at once.
    """

    def __init__(self, listener: socket.socket, host: str, port: int, room: asyncio.Semaphore) -> None:
        self._listener = listener
        self._host = host
        self._port = port
        self._own_room, self._room = asyncio.Semaphore(MAX_CONNECTIONS), room
        self._tasks: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        self._start_task()

    async def close(self) -> None:
        """End all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()

    def _start_task(self) -> None:
        keep_until_done(self._tasks, asyncio.create_task(self._forward_next()))

    async def _forward_next(self) -> None:
        # Forward the next connection; meanwhile another task waits for the one after it.
        async with self._own_room, self._room:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError:  # such as too many open files: try again soon
                await asyncio.sleep(0.1)
                return self._start_task()
            self._start_task()
            reader, writer = await asyncio.open_connection(sock=connection, limit=CHUNK)
            # If the gateway cannot be reached, the program's connection is closed, as a server that rejects it would.
            with closing(writer), suppress(OSError):
                outer_reader, outer_writer = await asyncio.open_connection(self._host, self._port, limit=CHUNK)
                with closing(outer_writer):
                    await asyncio.gather(_copy_stream(reader, outer_writer), _copy_stream(outer_reader, writer))


async def _copy_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy data until the end of the input, then end the output, without closing its connection for the other way."""
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
