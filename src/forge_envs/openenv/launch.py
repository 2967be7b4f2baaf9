"""OpenEnv servers as local processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Self

from forge.runtime.process import end_with_parent
from forge_envs.environment import InfrastructureError

from ..content import copy_command
from .client import OpenEnvClient, OpenEnvError

TAIL = 2000  # bytes of a log that an error shows
GRACE = 5.0  # seconds from SIGTERM to SIGKILL
_HEALTH_PAUSE = 0.1  # seconds between health checks


class LocalServer:
    """A server process that ends with this one, however that ends. Its output goes to a temporary file.

        async with await LocalServer.start(["uvicorn", "server.app:app", "--port", "{port}"]) as server:
            env = OpenEnvEnvironment(OpenEnvClient(server.url))

    Attributes:
        url: of the server.
    """

    def __init__(self, name: str, process: Process, log: IO[bytes], url: str) -> None:
        self.url = url
        self._name = name
        self._process = process
        self._log = log

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        port: int | None = None,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        limit: float = 60.0,
    ) -> Self:
        """Start it and wait until it is healthy.

        Args:
            command: program and arguments; {port} is replaced by the port to listen at, on 127.0.0.1.
            port: None picks a free one. It must not be in use.
            cwd: working directory.
            env: variables added to those of this process.
            limit: seconds until it must be healthy.

        Raises:
            ValueError: the command has no {port}.
            InfrastructureError: the port is in use, or the server ended or was not healthy in time; with the end of its
                log.
        """
        template = copy_command(command)
        if port is None and not any("{port}" in word for word in template):
            raise ValueError("the command must say {port} where the port belongs, or `port` which one it takes")
        with socket.socket() as listener:
            # As servers do: connections in TIME_WAIT do not block the port, only a listener does.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port or 0))
            except OSError as error:
                raise InfrastructureError(f"port {port} is unavailable, take another: {error.strerror}") from None
            port = int(listener.getsockname()[1])

        words = [word.replace("{port}", str(port)) for word in template]
        log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - it is closed with the server
        parent = os.getpid()
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                cwd=cwd,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                preexec_fn=lambda: end_with_parent(parent),
            )
        except OSError as error:
            log.close()
            raise InfrastructureError(f"{words[0]}: {error.strerror}") from error

        server = cls(words[0], process, log, f"http://127.0.0.1:{port}")
        try:
            await server._wait_healthy(limit)
        except BaseException:
            await server.stop()
            raise
        return server

    @property
    def pid(self) -> int:
        """Process group of the server."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the server's process has not ended."""
        return self._process.returncode is None

    def log(self) -> str:
        """Return the end of its output."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), TAIL, max(0, size - TAIL)).decode(errors="replace").strip()

    def check(self) -> None:
        """Raise InfrastructureError if it has ended, with its exit code and the end of its log."""
        if not self.running:
            raise InfrastructureError(self._describe_state())

    async def stop(self) -> None:
        """Send SIGTERM to its process group, and SIGKILL after 5 s."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), GRACE)
        self._log.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _describe_state(self) -> str:
        code = self._process.returncode
        state = "is still running" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            state = f"was ended by {signal.Signals(-code).name}"
        return f"{self._name} {state}; its log ends with:\n{self.log() or '(nothing)'}"

    async def _wait_healthy(self, limit: float) -> None:
        status = "no answer"
        try:
            async with asyncio.timeout(limit) as deadline, OpenEnvClient(self.url, timeout=limit) as client:
                while status != "healthy":
                    self.check()
                    try:
                        status = await client.health()
                    except (InfrastructureError, OpenEnvError) as error:  # OpenEnvError: it is still loading
                        status = str(error)
                    if status != "healthy":
                        await asyncio.sleep(_HEALTH_PAUSE)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise InfrastructureError(
                f"{self.url}/health was not healthy within {limit:g} s ({status}); {self._describe_state()}"
            ) from None
        self.check()  # or another process answers at this port
