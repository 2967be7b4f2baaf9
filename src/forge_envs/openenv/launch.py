"""OpenEnv servers as local processes."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Self

from forge.envs.environment import InfrastructureError

from ..process import Program, copy_command
from .client import OpenEnvClient, OpenEnvError

_HEALTH_PAUSE = 0.1  # seconds between health checks
_PORT_PATIENCE = 2.0  # seconds for a killed server to release its port
_MAX_ATTEMPTS = 3  # attempts: a free port may be taken before the server binds it


class LocalServer:
    """A server process that ends with this one, however that ends.

        async with await LocalServer.start(["uvicorn", "server.app:app", "--port", "{port}"]) as server:
            env = OpenEnvEnvironment(OpenEnvClient(server.url))

    Attributes:
        url: of the server.
    """

    def __init__(self, program: Program, url: str) -> None:
        self.url = url
        self._program = program

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
        if port is not None:
            await _wait_free(port)
        # A free port may be taken by another process before the server binds it: then another is tried.
        attempt = 1
        while True:
            used_port = port if port is not None else _free_port()
            filled = [word.replace("{port}", str(used_port)) for word in template]
            server = cls(await Program.start(filled, cwd=cwd, env=env), f"http://127.0.0.1:{used_port}")
            try:
                await server._wait_healthy(limit)
                return server
            except BaseException as error:
                port_taken = isinstance(error, InfrastructureError) and "address already in use" in server.log().lower()
                await server.stop()
                # A port that was asked for has no replacement.
                if not port_taken or port is not None or attempt == _MAX_ATTEMPTS:
                    raise
            attempt += 1

    @property
    def pid(self) -> int:
        """Process group of the server."""
        return self._program.pid

    @property
    def running(self) -> bool:
        """Whether the server's process has not ended."""
        return self._program.returncode is None

    def log(self) -> str:
        """Return the end of its output."""
        return self._program.tail()

    def check(self) -> None:
        """Raise InfrastructureError if it has ended, with its exit code and the end of its log."""
        if not self.running:
            raise InfrastructureError(self._program.describe_end())

    async def stop(self) -> None:
        """Send SIGTERM to its process group, and SIGKILL after 5 s."""
        await self._program.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

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
                f"{self.url}/health was not healthy within {limit:g} s ({status}); {self._program.describe_end()}"
            ) from None
        self.check()  # or another process answers at this port


async def _wait_free(port: int) -> None:
    """Wait until the port is free. InfrastructureError: another process listens there and would answer in its place."""
    if not 0 < port < 1 << 16:
        raise ValueError(f"port must be from 1 to 65535, got {port}")
    with socket.socket() as listener:
        # As servers do: connections in TIME_WAIT do not block the port, only a listener does.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        deadline = time.monotonic() + _PORT_PATIENCE
        while True:
            try:
                return listener.bind(("127.0.0.1", port))
            except OSError as error:
                if time.monotonic() > deadline:
                    raise InfrastructureError(f"port {port} is unavailable, take another: {error.strerror}") from None
            await asyncio.sleep(_HEALTH_PAUSE)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
