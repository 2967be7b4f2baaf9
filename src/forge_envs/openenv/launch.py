"""An environment server on this machine, for as long as it is needed."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from forge.envs.environment import InfrastructureError

from ..process import Program, words
from .client import OpenEnvClient, OpenEnvError

_PAUSE = 0.1  # seconds between two looks at its health
_LEAVING = 2.0  # seconds in which a server that was killed may still have its port
_PORTS = 3  # ports that are tried: a free one may be taken before the server has it


class LocalServer:
    """A server as a process of its own, which ends with this one, however that ends.

        async with await LocalServer.start(["uvicorn", "server.app:app", "--port", "{port}"]) as server:
            env = OpenEnvEnvironment(OpenEnvClient(server.url))

    Attributes:
        url: where it answers.
    """

    def __init__(self, program: Program, url: str) -> None:
        self._program, self.url = program, url

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
        """Start it and wait until it says that it is healthy.

        Args:
            command: its words; {port} in them is the port that it must listen at, on 127.0.0.1.
            port: None is a free one. One at which somebody listens already is refused.
            cwd: where it runs.
            env: variables in addition to those of this process.
            limit: seconds until it must be healthy.

        Raises:
            ValueError: the command has no {port}. InfrastructureError: the port is taken; it ended, or was not healthy
                in time, with the end of its log.
        """
        pattern = words(command)
        if port is None and not any("{port}" in word for word in pattern):
            raise ValueError("the command must say {port} where the port belongs, or `port` which one it takes")
        if port is not None:
            await _until_free(port)
        attempt = 1
        while True:
            number = port if port is not None else _free_port()
            here = [word.replace("{port}", str(number)) for word in pattern]
            server = cls(await Program.start(here, cwd=cwd, env=env), f"http://127.0.0.1:{number}")
            try:
                await server._healthy(limit)
                return server
            except BaseException as error:
                taken = isinstance(error, InfrastructureError) and "address already in use" in server.log().lower()
                await server.stop()
                if not taken or port is not None or attempt == _PORTS:
                    raise
            attempt += 1

    @property
    def pid(self) -> int:
        """Of its process group."""
        return self._program.pid

    @property
    def running(self) -> bool:
        return self._program.returncode is None

    def log(self) -> str:
        """The end of what it wrote."""
        return self._program.tail()

    def check(self) -> None:
        """InfrastructureError: it has ended; says with which exit code, and the end of its log."""
        if not self.running:
            raise InfrastructureError(self._program.ended())

    async def stop(self) -> None:
        """SIGTERM, and after 5 s SIGKILL, to it and all that it started."""
        await self._program.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _healthy(self, limit: float) -> None:
        said = "no answer"
        try:
            async with asyncio.timeout(limit) as deadline, OpenEnvClient(self.url, timeout=limit) as client:
                while True:
                    self.check()
                    try:
                        said = await client.health()
                        if said == "healthy":
                            break
                    except (InfrastructureError, OpenEnvError) as error:  # the latter from one that still loads
                        said = str(error)
                    await asyncio.sleep(_PAUSE)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise InfrastructureError(
                f"{self.url}/health was not healthy within {limit:g} s ({said}); {self._program.ended()}"
            ) from None
        self.check()  # else another process has answered at this port


async def _until_free(port: int) -> None:
    """InfrastructureError: somebody listens there, who would answer in place of the server."""
    if not 0 < port < 1 << 16:
        raise ValueError(f"port must be from 1 to 65535, got {port}")
    with socket.socket() as listening:
        # As servers do: what is left of connections that have ended is in nobody's way, only one that listens.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        last = time.monotonic() + _LEAVING
        while True:
            try:
                return listening.bind(("127.0.0.1", port))
            except OSError as error:
                if time.monotonic() > last:
                    raise InfrastructureError(f"port {port} cannot be had, take another: {error.strerror}") from None
            await asyncio.sleep(_PAUSE)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
