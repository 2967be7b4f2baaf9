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

from ..content import check_command, tail_of
from .client import OpenEnvClient

GRACE = 5.0  # seconds from SIGTERM to SIGKILL
_HEALTH_PAUSE = 0.1  # seconds between health checks


class LocalServer:
    """A server process that ends with this one, however that ends. Its output goes to a temporary file.

        async with await LocalServer.start(["uvicorn", "server.app:app", "--port", "{port}"]) as server:
            env = OpenEnvEnvironment(OpenEnvClient(server.url))

    Attributes:
        url: of the server.
        process: it, the first of its group.
    """

    def __init__(self, process: Process, log: IO[bytes], url: str) -> None:
        self.url = url
        self.process = process
        self._log = log

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        limit: float = 60.0,
    ) -> Self:
        """Start it and wait until it is healthy.

        Args:
            command: program and arguments; {port} is replaced by a free port, to listen at on 127.0.0.1.
            cwd: working directory.
            env: variables added to those of this process.
            limit: seconds until it must be healthy.

        Raises:
            ValueError: the command has no {port}.
            InfrastructureError: the server ended or was not healthy in time; with the end of its log.
        """
        check_command(command)
        if not any("{port}" in word for word in command):
            raise ValueError("the command must say {port} where the port belongs")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
        words = [word.replace("{port}", port) for word in command]
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

        server = cls(process, log, f"http://127.0.0.1:{port}")
        try:
            await server._wait_healthy(words[0], limit)
        except BaseException:
            await server.stop()
            raise
        return server

    async def stop(self) -> None:
        """Send SIGTERM to its process group, and SIGKILL after 5 s."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), GRACE)
        self._log.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _wait_healthy(self, name: str, limit: float) -> None:
        status, end = "no answer", asyncio.get_running_loop().time() + limit
        async with OpenEnvClient(self.url, timeout=limit) as client:
            while status != "healthy":
                try:
                    status = await client.health()
                except InfrastructureError as error:
                    status = str(error)
                code = self.process.returncode
                is_late = asyncio.get_running_loop().time() > end
                if code is not None or is_late:
                    state = f"was not healthy within {limit:g} s ({status})" if code is None else "ended"
                    if code is not None:
                        state += f" by {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"
                    raise InfrastructureError(f"{name} {state}; its log ends with:\n{tail_of(self._log)}")
                await asyncio.sleep(_HEALTH_PAUSE)
