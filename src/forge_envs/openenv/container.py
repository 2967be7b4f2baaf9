"""OpenEnv servers as containers of the local Docker daemon."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Self

from forge.envs.environment import InfrastructureError

from .client import OpenEnvClient, OpenEnvError

HEALTH_PAUSE = 0.2  # seconds between health checks
REMOVAL = 30.0  # seconds to remove a container
LOG_LINES = 30

# The daemon has the container, so that it would outlive this process. Another one waits at a pipe whose write end is
# open only here: however this process ends, even by SIGKILL, it sees the end of the pipe and removes the container. A
# fork of this process also holds the pipe, so the parent is checked once a second.
_REMOVER = """
import os, select, subprocess, sys
parent, docker, name = int(sys.argv[1]), sys.argv[2], sys.argv[3]
while not select.select([0], [], [], 1)[0] and os.getppid() == parent:
    pass
sys.exit(subprocess.run([docker, "rm", "--force", "--volumes", name], stdout=subprocess.DEVNULL).returncode)
"""


class ContainerServer:
    """A server in a container, which is removed when it is stopped and when this process ends, however that ends.

        async with await ContainerServer.start("echo-env:latest") as server:
            env = OpenEnvEnvironment(OpenEnvClient(server.url))

    Attributes:
        name: of the container.
        url: of the server.
    """

    def __init__(self, docker: str, name: str, remover: Process) -> None:
        self.name = name
        self.url = ""
        self._docker = docker
        self._remover = remover

    @classmethod
    async def start(
        cls,
        image: str,
        *,
        port: int = 8000,
        env: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        limit: float = 120.0,
        docker: str = "docker",
    ) -> Self:
        """Start a container and wait until its server is healthy.

        Args:
            port: at which the server listens in the container; docker picks one of this machine's loopback for it.
            env: variables of the container.
            arguments: further ones of `docker run`, such as ["--memory", "2g"].
            limit: seconds until it must be healthy, those to pull the image included.
            docker: the client; it finds the daemon by DOCKER_HOST or its context.

        Raises:
            InfrastructureError: no client, no daemon, no such image, or a server that ended or was not healthy in time;
                with the end of its log.
        """
        name = f"forge-{secrets.token_hex(6)}"
        variables = [word for item in (env or {}).items() for word in ("--env", "=".join(item))]
        published = ("--publish", f"127.0.0.1::{port}")
        try:
            remover = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _REMOVER, str(os.getpid()), docker, name),
                stdin=PIPE,
                stderr=DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise InfrastructureError(f"no process could be started: {error}") from error
        server = cls(docker, name, remover)
        try:
            async with asyncio.timeout(limit) as deadline:
                await server._call("run", "--detach", "--name", name, *published, *variables, *arguments, image)
                address = (await server._call("port", name, str(port))).split()[0]
                server.url = f"http://{address}"
                await server._wait_healthy(limit)
            return server
        except BaseException as error:
            log = await server.log() if server.url else ""
            await server.stop()
            if isinstance(error, TimeoutError) and deadline.expired():
                raise InfrastructureError(
                    f"{image} was not healthy within {limit:g} s; its log ends with:\n{log}"
                ) from None
            raise

    async def log(self) -> str:
        """Return the end of its output."""
        with suppress(InfrastructureError):
            return await self._call("logs", "--tail", str(LOG_LINES), self.name, errors=True)
        return "(nothing)"

    async def check(self) -> None:
        """Raise InfrastructureError if it has ended, with its exit code and the end of its log."""
        state = await self._call("inspect", "--format", "{{.State.Running}} {{.State.ExitCode}}", self.name)
        running, code = state.split()
        if running != "true":
            raise InfrastructureError(
                f"{self.name} ended with exit code {code}; its log ends with:\n{await self.log()}"
            )

    async def stop(self) -> None:
        """Remove the container; idempotent."""
        assert self._remover.stdin is not None
        self._remover.stdin.close()
        async with asyncio.timeout(REMOVAL):
            await self._remover.wait()

    async def _wait_healthy(self, limit: float) -> None:
        async with OpenEnvClient(self.url, timeout=limit, patience=limit) as client:
            while True:
                await self.check()
                with suppress(InfrastructureError, OpenEnvError):  # it is still loading
                    if await client.health() == "healthy":
                        return
                await asyncio.sleep(HEALTH_PAUSE)

    async def _call(self, *words: str, errors: bool = False) -> str:
        """Output of a command of docker; with `errors` also what it writes there."""
        try:
            process = await asyncio.create_subprocess_exec(
                self._docker, *words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
            )
        except OSError as error:
            raise InfrastructureError(f"{self._docker} could not be started: {error.strerror}: install it") from None
        try:
            stdout, stderr = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        printed = stdout.decode(errors="replace").strip()
        complaint = stderr.decode(errors="replace").strip()
        if process.returncode:
            raise InfrastructureError(f"{self._docker} {words[0]}: {complaint or f'exit code {process.returncode}'}")
        return f"{printed}\n{complaint}".strip() if errors else printed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
