"""Agents that are commands: any program, run confined for one episode, whose only network is the gateway.

docs/agent_commands.md says what a program can do, and what is not covered.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from forge.system.scratch import Scratch
from forge_envs.environment import InfrastructureError

from .agent import AgentCommand, CommandResult, Network, environment
from .forward import Forwarder
from .task_folder import fill, remove, unlock

__all__ = ["AgentCommand", "CommandResult", "CommandRunner"]

log = logging.getLogger(f"forge.{__name__}")

Level = Literal["namespaces", "none"]
Settings = dict[str, Any]  # of the keeper, see `forge_agents.keeper`
INNER_FOLDER = "/task"  # the task folder, as a confined program sees it
MAX_TEXT = 120_000  # bytes of one word of a command or environment: Linux takes 128 KiB
KEEPER_TIMEOUT = 30.0  # seconds that a keeper may take beside the time of its program
PROBE = ("/bin/sh", "-c", 'test ! -e "$1" && test "$(id -u)" != 0 && echo confined', "sh")
# What programs need of the system, where it exists; of /etc nothing with a secret.
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/dev/random", "/dev/full"),
    *(f"/etc/{name}" for name in ("alternatives", "ssl", "ca-certificates", "pki", "passwd", "group", "nsswitch.conf")),
    *(f"/etc/{name}" for name in ("hosts", "host.conf", "resolv.conf", "localtime", "timezone", "os-release")),
    *(f"/etc/{name}" for name in ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "protocols", "services", "terminfo")),
)
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The keeper starts without this library's packages: their folders are enough to import single modules of them.
_BOOT = """
import runpy, sys, types
sources, sys.argv = sys.argv[1], sys.argv[1:]
for name in ("forge_sandbox", "forge_sandbox.inside", "forge_agents"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [sources + "/" + name.replace(".", "/")]
from forge_agents.keeper import main
main(*map(int, sys.argv[1:]))
"""


class CommandRunner:
    """Runs agents, any number at once, each in a new task folder.

    Args:
        allow_unsafe: where namespaces are not permitted, run programs with all rights of this user, instead of an
            error at `start`. Limits, the environment and the end of all processes remain.
        folder: where task folders are created; by default that for temporary files.
        python: the interpreter of the processes that watch programs; by default the running one.
    """

    def __init__(
        self, *, allow_unsafe: bool = False, folder: str | Path | None = None, python: str | None = None
    ) -> None:
        self.level: Level = "namespaces"
        self._allow_unsafe = allow_unsafe
        self._parent = folder
        self._python = python or sys.executable
        self._scratch: Scratch | None = None
        self._runs: set[asyncio.Task[CommandResult]] = set()
        self._number = 0

    async def start(self) -> None:
        """Check that programs are confined here.

        Raises:
            InfrastructureError: they are not, and `allow_unsafe` is not set.
        """
        if self._scratch is not None:
            return
        self._scratch = Scratch("forge-agents-", self._parent)
        marker = self._scratch.path / "marker"
        marker.touch()
        try:
            result = await self.run(AgentCommand([*PROBE, str(marker)], timeout=10))
            result.remove()
            if result.status == "exited" and result.stdout == "confined\n":
                return
            reason = result.reason or f"a program was not confined: {result.stderr.strip() or 'it saw this machine'}"
        except OSError as error:
            reason = str(error)
        if not self._allow_unsafe:
            await self.close()
            raise InfrastructureError(
                f"agents cannot be confined here ({reason}): allow user namespaces, or accept programs with all your "
                "rights by allow_unsafe=True (docs/agent_commands.md)"
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
        """Run a program until it ends or is ended at a limit. If this call is cancelled, the program is ended.

        Args:
            url: of the gateway, `http://HOST:PORT` without `/v1`. None: no network at all, as for a test.
            key, model: those that the program is to give the gateway.
            files: texts that are written into the task folder, by path.
            folder: the task folder of an earlier result, to run in it once more; by default a new one, with the
                command's files.

        Raises:
            ValueError: an invalid address, path or text.
            RuntimeError: not started, or closed.
        """
        if self._scratch is None:
            raise RuntimeError("the runner is not running: await runner.start() first")
        outer = _address(url, command.network, self.level)
        new = folder is None
        if folder is None:
            self._number += 1
            folder = self._scratch.path / str(self._number) / "task"
        words = {"url": url or "", "key": key, "model": model, "task": task_text}
        words["folder"] = INNER_FOLDER if self.level == "namespaces" else str(folder)
        if outer is not None:
            words["url"] = f"http://127.0.0.1:{outer[1]}{urlsplit(words['url']).path}"
        settings = self._settings(command, words, folder)
        settings["port"] = None if outer is None else outer[1]
        # A program without a gateway has no network.
        settings["network"] = "gateway" if url is None else command.network
        owned = self.level == "namespaces" and os.geteuid() == 0
        filling = partial(fill, folder, command.files if new else None, files or {}, new=new, owned=owned)
        # `close` ends the run by this task, and waits for it.
        run = asyncio.ensure_future(self._play(filling, settings, folder, new, outer))
        self._runs.add(run)
        run.add_done_callback(self._runs.discard)
        return await run

    async def close(self) -> None:
        """End all runs, and remove all task folders."""
        for run in [*self._runs]:
            run.cancel()
        await asyncio.gather(*self._runs, return_exceptions=True)
        if self._scratch is not None:
            await asyncio.to_thread(unlock, self._scratch.path)
            await asyncio.to_thread(self._scratch.close)
            self._scratch = None

    async def __aenter__(self) -> CommandRunner:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _play(
        self, filling: Callable[[], None], settings: Settings, folder: Path, new: bool, outer: tuple[str, int] | None
    ) -> CommandResult:
        """Fill the folder and run; a run that is not finished leaves no new folder."""
        filled = asyncio.ensure_future(asyncio.to_thread(filling))
        try:
            await asyncio.shield(filled)
            return await self._run(settings, folder, outer)
        except BaseException:
            await asyncio.wait([filled])
            if new:
                await asyncio.to_thread(remove, folder.parent)
            raise

    def _settings(self, command: AgentCommand, words: Mapping[str, str], folder: Path) -> Settings:
        """The keeper's settings, with all placeholders replaced. ValueError: a text that no program can be given, or a
        readable folder that holds those of all runs."""
        for path in command.readable:
            if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(path)):
                raise ValueError(f"readable has {path}, which holds the folders of all runs: name what is needed in it")
        readable = _readable(command)
        pattern = re.compile("|".join(rf"\{{{name}\}}" for name in words))

        def filled(text: str) -> str:
            # In one pass: a task that contains {key} is not a place for it.
            return pattern.sub(lambda match: words[match.group()[1:-1]], text)

        env = environment(words, program_path(command))
        env |= {name: filled(text) for name, text in command.env.items()}
        line = [filled(word) for word in command.command]
        for text in (*line, *env.values()):
            if "\0" in text or len(text.encode(errors="surrogateescape")) > MAX_TEXT:
                raise ValueError(
                    f"the command or a variable of it has a text of {len(text)} characters, or one with a zero byte: "
                    f"Linux takes {MAX_TEXT} bytes; write a long task into a file"
                )
        return {
            "level": self.level,
            "command": line,
            "env": env,
            "folder": str(folder),
            "inner_folder": words["folder"],
            "scratch": str(folder.parent / "tmp"),
            "readable": [*filter(os.path.exists, SYSTEM), *readable],
            "timeout": command.timeout,
            "memory_mb": command.memory_mb,
            "processes": command.processes,
            "output_kb": command.output_kb,
            "parent": os.getpid(),
        }

    async def _run(self, settings: Settings, folder: Path, outer: tuple[str, int] | None) -> CommandResult:
        forwarder = None if outer is None else Forwarder(*outer)
        control, keeper_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        settings_file = _memory_file(json.dumps(settings).encode())
        result_file = _memory_file(b"")
        errors = _memory_file(b"")
        process: Process | None = None
        try:
            descriptors = (settings_file, result_file, keeper_end.fileno())
            try:
                process = await asyncio.create_subprocess_exec(
                    *(self._python, "-I", "-S", "-c", _BOOT, str(Path(__file__).parents[1])),
                    *map(str, descriptors),
                    stdin=DEVNULL,
                    stdout=DEVNULL,
                    stderr=errors,
                    env={},
                    start_new_session=True,
                    pass_fds=descriptors,
                )
            except OSError as error:
                return _failed(folder, f"the keeper could not be started: {error}")
            finally:
                keeper_end.close()
            if forwarder is not None and (listener := await _receive_listener(control)):
                await forwarder.serve(listener)
            try:
                await asyncio.wait_for(process.wait(), settings["timeout"] + KEEPER_TIMEOUT)
            except TimeoutError:
                return _failed(folder, f"the keeper did not end within {KEEPER_TIMEOUT:g} s of the program's time")
            text = _content(result_file)
            if not text:
                said = " ".join(_content(errors).decode(errors="replace").split())[-500:]
                return _failed(folder, f"the keeper ended with exit code {process.returncode}: {said or 'no word'}")
            result = json.loads(text)
            if result["status"] == "failed":
                return _failed(folder, result["reason"])
            if result["status"] == "missing":
                result["reason"] = (
                    f"{settings['command'][0]} cannot be executed ({result['reason']}): a program that is not of the "
                    "system must be in a folder of `readable`, or in its `bin`"
                )
            names = ("status", "exit_code", "stdout", "stderr", "seconds", "reason")
            return CommandResult(folder=folder, **{name: result[name] for name in names})
        finally:
            # The keeper ends the program as this closes.
            control.close()
            if forwarder is not None:
                await forwarder.close()
            if process is not None and process.returncode is None:
                await _end(process)
            for descriptor in (settings_file, result_file, errors):
                os.close(descriptor)


def _readable(command: AgentCommand) -> list[str]:
    """All that a program may read beside the system: what its command names, and this Python."""
    prefixes = [path for path in (sys.prefix, sys.base_prefix) if os.access(path, os.R_OK | os.X_OK)]
    return [os.path.abspath(path) for path in (*command.readable, *prefixes)]


def program_path(command: AgentCommand) -> str:
    """The PATH of a command: folders that its program may be in."""
    bins = [f"{path}/bin" for path in _readable(command) if os.path.isdir(f"{path}/bin")]
    return ":".join([*bins, SYSTEM_PATH])


def _address(url: str | None, network: Network, level: Level) -> tuple[str, int] | None:
    """Host and port of the gateway, where its connections are forwarded. ValueError: it is not plain http."""
    if url is None:
        return None
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or url.endswith("/v1"):
        raise ValueError(f"url must be http://HOST:PORT of the gateway without /v1, got {url!r}")
    return (parts.hostname, parts.port or 80) if network == "gateway" and level == "namespaces" else None


async def _receive_listener(control: socket.socket) -> socket.socket | None:
    """The socket that the keeper made in the program's network; None if it ended before."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(control, ready.cancel)
    try:
        await asyncio.wait([ready], timeout=KEEPER_TIMEOUT)
    finally:
        loop.remove_reader(control)
    if not ready.done():
        return None
    _, descriptors, _, _ = socket.recv_fds(control, 64, 1)
    return socket.socket(fileno=descriptors[0]) if descriptors else None


async def _end(process: Process) -> None:
    """Wait for a keeper whose socket is closed; kill it if it hangs, with which its program ends, too."""
    waiting = asyncio.ensure_future(process.wait())
    with suppress(TimeoutError, asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(waiting), 2 * KEEPER_TIMEOUT)
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
        await waiting


def _failed(folder: Path, reason: str) -> CommandResult:
    return CommandResult("failed", -1, "", "", 0.0, folder, reason)


def _memory_file(content: bytes) -> int:
    descriptor = os.memfd_create("forge-agent")
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
